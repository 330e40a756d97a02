"""What a user of the Python interface sees: names, short representations, and paths as text or as objects."""

from __future__ import annotations

import pkgutil
import types
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedveil as fv
from fedveil.bundle.export import export_torch
from fedveil.data import catalogue
from fedveil.data.schema import read_schema
from fedveil.data.tables import read_tables
from fedveil.errors import ConfigError, FedveilError
from fedveil.files import as_path
from tests.shape_checks import look_at
from tests.test_python import X, network, train

LONGEST = 200
"""Characters of a representation, paths left aside."""


class Seen(fv.Callback):
    """Keeps what it is told of the last round, private numbers included."""

    sees_private = True

    def on_round_end(self, round: fv.RoundSummary) -> str | None:
        self.last = round
        return None


@pytest.fixture(scope="module")
def seen() -> Seen:
    return Seen()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, seen: Seen) -> fv.Result:
    return train(tmp_path_factory.mktemp("runs"), rounds=1, callbacks=[seen])


@pytest.fixture(scope="module")
def bundle(trained: fv.Result) -> fv.Bundle:
    return fv.load(trained.save(trained.folder.parent / "bundle"), network())


@pytest.fixture
def table(tmp_path: Path) -> Path:
    lines = ["a,b,c", *(",".join(map(str, X[row])) for row in range(5))]
    path = tmp_path / "t.csv"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


# --- names -------------------------------------------------------------------------------------------------------


def test_the_package_lists_its_public_names_alone() -> None:
    assert [name for name in dir(fv) if not name.startswith("_")] == sorted(fv.__all__)
    for name in ("os", "Any", "Final", "TYPE_CHECKING", "import_module"):
        with pytest.raises(AttributeError, match="public names: Adam, "):
            getattr(fv, name)
    assert dir(catalogue) == sorted(catalogue.__all__)


def test_no_package_lists_what_it_imports_from_elsewhere() -> None:
    found = []
    for one in pkgutil.walk_packages(fv.__path__, "fedveil."):
        if one.ispkg:
            package = import_module(one.name)
            listed = {name for name in dir(package) if not name.startswith("_")}
            listed -= {
                *getattr(package, "__all__", ()),
                "jaxtyping",
            }  # which the checks of the tests put there
            found += [
                f"{one.name}.{name}"
                for name in listed
                if not isinstance(getattr(package, name), types.ModuleType)
                or not getattr(package, name).__name__.startswith("fedveil.")
            ]
    assert found == []


# --- representations ---------------------------------------------------------------------------------------------


def test_what_a_user_gets_back_is_shown_in_a_line(trained: fv.Result, bundle: fv.Bundle, seen: Seen) -> None:
    folder = str(trained.folder.parent)
    for shown in (
        trained,
        trained.statement,
        trained.predictor,
        bundle,
        bundle.manifest,
        bundle.statement,
        bundle.predictor,
        fv.verify(bundle.path),
        seen.last,
        fv.uldp_avg(clip=0.5),
        fv.Sgd(1.0),
    ):
        text = repr(shown).replace(folder, "")
        assert len(text) <= LONGEST, text
        assert text.startswith(f"{type(shown).__name__}(")
        assert "\n" not in text
    assert repr(trained.statement) == "Statement(epsilon=3.14, delta=0.001 for one user, released=models)"
    assert "model='session:Sequential', task='classification', epsilon=3.14" in repr(bundle)
    assert repr(fv.verify(bundle.path)).endswith("holds=True, checks: 11 holds, 0 fails, 9 unchecked)")


def test_a_statement_prints_its_sentences(trained: fv.Result) -> None:
    assert str(trained.statement).splitlines() == list(trained.statement.sentences())
    assert f"{trained.statement}".startswith("Adding or removing one user")


def test_a_round_shows_no_private_number(trained: fv.Result, seen: Seen) -> None:
    assert seen.last.private
    assert repr(seen.last).startswith("RoundSummary(1 of 1, epsilon=3.14, folder='")


# --- paths -------------------------------------------------------------------------------------------------------


def test_predictions_for_a_table_take_text_and_path_alike(bundle: fv.Bundle, table: Path) -> None:
    with pytest.warns(UserWarning, match="columns of these records are taken by their places") as warned:
        by_path, by_text = bundle.predict_table(table), bundle.predict_table(str(table), ["a"])
    assert {one.filename for one in warned} == {__file__}  # the caller's line, not one of fedveil
    assert by_text.column_names[0] == "a"
    assert by_path.equals(by_text.drop_columns(["a"]))
    assert np.array_equal(by_text["prediction"].to_numpy(), bundle.predict(X[:5]))
    with pytest.raises(ConfigError, match=r"keep is a list of columns, \['a'\]"):
        bundle.predict_table(table, "a")


def test_every_function_that_takes_a_path_takes_text(
    trained: fv.Result, bundle: fv.Bundle, tmp_path: Path
) -> None:
    assert fv.load(str(bundle.path), network()).manifest == bundle.manifest
    assert fv.verify(str(bundle.path)).holds
    assert fv.verify(str(bundle.path), charter=str(tmp_path / "no")).path == bundle.path
    assert export_torch(bundle, str(tmp_path / "model.pt")) == tmp_path / "model.pt"
    assert trained.save(str(tmp_path / "saved")) == tmp_path / "saved"
    assert trained.report(str(tmp_path / "page.html")) == tmp_path / "page.html"
    assert fv.Checkpoints(str(tmp_path)).folder == tmp_path
    for wrong in (str(tmp_path / "no.toml"), tmp_path / "no.toml"):
        for read in (read_schema, lambda path: fv.tables(path, [path])):
            with pytest.raises(FedveilError, match=r"no\.toml"):
                read(wrong)
        with pytest.raises(FedveilError, match=r"is no run folder|no\.toml"):
            fv.resume(wrong, network(), None)  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", [3, None, b"run", ["run"]])
def test_what_is_no_path_is_refused_by_name(trained: fv.Result, bundle: fv.Bundle, wrong: Any) -> None:
    look_at(0, "unchecked")  # as in a program, where nothing checks the types of arguments
    calls: dict[str, Callable[[], object]] = {
        "load": lambda: fv.load(wrong),
        "verify": lambda: fv.verify(wrong),
        "predict_table": lambda: bundle.predict_table(wrong),
        "save": lambda: trained.save(wrong),
        "Checkpoints": lambda: fv.Checkpoints(wrong),
        "tables: schema": lambda: fv.tables(wrong, []),
        "read_schema": lambda: read_schema(wrong),
        "fedveil.train: folder": lambda: train(wrong),
        "fedveil.resume: folder": lambda: fv.resume(wrong, network(), None),  # type: ignore[arg-type]
    }
    for where, call in calls.items():
        with pytest.raises(
            ConfigError, match=f"^{where}: a path is needed, as text or as a pathlib.Path, not"
        ):
            call()
    assert as_path("a/b", "here") == Path("a/b")


def test_tables_are_read_from_text_and_path_alike(tmp_path: Path) -> None:
    (tmp_path / "schema.toml").write_text(
        'n_users = 5\nuser = "id"\ntarget = { kind = "label", column = "sick", classes = ["no", "yes"] }\n'
        '[features]\nage = { kind = "number", lower = 0, upper = 100 }\n',
        encoding="utf-8",
    )
    (tmp_path / "north.csv").write_text("id,age,sick\na,50,no\nb,60,yes\nc,70,no\n", encoding="utf-8")
    schema = read_schema(str(tmp_path / "schema.toml"))
    by_text = read_tables(schema, [str(tmp_path / "north.csv")], test_share=0.5)
    by_path = read_tables(read_schema(tmp_path / "schema.toml"), [tmp_path / "north.csv"], test_share=0.5)
    assert np.array_equal(by_text.train.features, by_path.train.features)
    held = fv.tables(str(tmp_path / "schema.toml"), [str(tmp_path / "north.csv")])
    assert len(repr(held.source).replace(str(tmp_path), "")) <= LONGEST
