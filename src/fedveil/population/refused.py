"""For what one record has all of them refused, as statements say it: no noise hides whether a run begins."""

from typing import Final

OF_ARRAYS: Final = (
    "All records are refused for one whose id is missing, or one of whose values is missing, infinite or not allowed: "
    "that there is none, as a run shows that begins, is not covered."
)


def of_tables(binned: bool) -> str:
    """Return the sentence for tables.

    Args:
        binned: whether invalid cells have a place of their own.
    """
    cells = "" if binned else ", or, in training and by silos, one of whose cells is not as declared"
    instead = "" if binned else ' (invalid = "bin" refuses no cell)'
    return (
        f"A table is refused for one record whose id or silo is missing or unknown, whose line is not whole{cells}; "
        f"that there is none, as a run shows that begins, is not covered{instead}."
    )
