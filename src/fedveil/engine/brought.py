"""What of a run comes from other packages: its code is not the house's, and what it claims nobody here has checked."""

from __future__ import annotations

from fedveil.engine.experiment import Experiment, asked_for
from fedveil.engine.sections import SESSION
from fedveil.foreign import foreign
from fedveil.registry import KINDS, Member, outsiders


def brought(experiment: Experiment) -> tuple[Member, ...]:
    """Return the members that an experiment asks for and other packages bring."""
    asked = asked_for(experiment.model_dump(mode="json", exclude_none=True))
    named = {key: one for key, one in asked.items() if not one[1].startswith(SESSION)}
    return tuple(outsiders(named).values())


def at_their_word(experiment: Experiment) -> tuple[str, ...]:
    """Return, for the statement, whose claims a run rests on: nothing shows that such a stage does what it says."""
    return tuple(
        f"the {KINDS[one.kind]} {foreign(one.name)} comes from the package {foreign(one.package)} "
        f"{foreign(one.version)}, whose claims are taken at their word: that it does what it claims was not checked"
        for one in brought(experiment)
    )
