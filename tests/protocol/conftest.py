from hypothesis import settings

# Two loaded cores stretch an example past any deadline; pytest-timeout catches what hangs.
settings.register_profile("dissociated", deadline=None)
settings.load_profile("dissociated")
