"""Programs that show the whole way of data. Each has a folder and says at its top how it is run."""
