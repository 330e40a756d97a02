"""The variable by which a plugin's author adds a member to a contract suite."""

from __future__ import annotations

import pytest

from fedveil.errors import ConfigError
from fedveil.training.server.averages import Tail
from tests.contract.plugin_members import VARIABLE, plugin_members


def test_a_member_is_found_by_its_kind_and_path() -> None:
    asked = {
        VARIABLE: "averages=fedveil.training.server.averages:Tail,samplers=fedveil.privacy.sampling:Everyone"
    }
    assert plugin_members("averages", asked) == {"fedveil.training.server.averages:Tail": Tail}
    assert plugin_members("denoisers", asked) == plugin_members("averages", {}) == {}


def test_a_slip_does_not_leave_a_member_untested() -> None:
    with pytest.raises(ValueError, match="'sampler=a:b' is not kind=module:object"):
        plugin_members("samplers", {VARIABLE: "sampler=a:b"})
    with pytest.raises(ConfigError, match=r"fedveil\.training has no NOTHING"):
        plugin_members("averages", {VARIABLE: "averages=fedveil.training:NOTHING"})
