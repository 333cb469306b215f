"""The option `filters`: conditions as JSON.

They are an option of each read, and not what Spark hands over (`pushFilters`): Spark 4.1 to 4.3 keep that with the
DataFrame, and give the rows of one query to the next.
"""

from __future__ import annotations

import json

from dissociated.codec.conditions import Conditions
from dissociated.errors import OptionError


def parse_filters(text: str) -> Conditions:
    """JSON: a list of `[column, operator, value]`, which must all be true, or a list of such lists.

    Raises OptionError.
    """
    try:
        plain = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise OptionError(f"the option filters is not JSON: {error}") from None
    return Conditions.parse(plain)
