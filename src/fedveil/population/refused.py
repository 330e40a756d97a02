"""For which single records all data are refused, as statements say it: no noise hides whether a run begins."""

from typing import Final

OF_ARRAYS: Final = (
    "A single record with a missing id, or with a missing, infinite or disallowed value, causes all records to be "
    "refused. A run that begins therefore shows that there is no such record, and no guarantee covers this."
)


def of_tables(binned: bool) -> str:
    """Return the sentence for tables.

    Args:
        binned: whether invalid cells have a place of their own.
    """
    cells = "" if binned else ", or, in training and by silos, with a cell that is not as declared"
    instead = "" if binned else ' (invalid = "bin" refuses no cell)'
    return (
        f"A single record with a missing or unknown id or silo, with an incomplete line{cells}, causes its table to be "
        f"refused{instead}. A run that begins therefore shows that there is no such record, and no guarantee covers "
        "this."
    )
