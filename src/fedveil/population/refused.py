"""For which single records all data are refused, as statements say it: no noise hides whether a run begins.

``tests/test_named_refusals.py`` lists every refusal that a record can cause, beside the words here that name it.
"""

from typing import Final

_BEGINS: Final = (
    "A run that begins therefore shows that there is no such record, and no guarantee covers this."
)

OF_ARRAYS: Final = (
    "A single record causes all records to be refused if its id is missing or its silo is not declared; if it has a "
    "missing, infinite or disallowed value, another type or shape than the other records, or another index in one "
    "pandas column than in the next; if its user is one more than n_users; or if the code of a data set fails at it. A "
    f"list or a data set without any record is refused too. {_BEGINS}"
)

OF_CLIENTS: Final = (
    "A single record that gives a client's silo a second user, or a user a second silo, causes all records to be "
    f"refused. {_BEGINS}"
)

OF_PUBLIC_TESTS: Final = (
    "All records are refused if more of the test records are also training records than chance explains. A run that "
    "begins therefore shows that they are not, and no guarantee covers this."
)


def of_tables(binned: bool) -> str:
    """Return the sentence for tables.

    Args:
        binned: whether invalid cells have a place of their own.
    """
    cells = "" if binned else ", or, in training and by silos, with a cell that is not as declared"
    instead = "" if binned else ' (invalid = "bin" refuses no cell)'
    return (
        "A single record with a missing or unknown id or silo, of one user more than n_users, with an incomplete or "
        f"unreadable line{cells}, causes its table to be refused{instead}. {_BEGINS}"
    )
