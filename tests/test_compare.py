"""Comparison of runs: means over seeds and over nothing else, and honest words about unlike guarantees."""

import json
import math
import re
import statistics
from collections.abc import Sequence
from pathlib import Path

import pytest

import fedveil as fv
from fedveil.errors import RunFolderError
from fedveil.report.compare import Spread, compare
from fedveil.report.drawing import Plot, Series
from fedveil.report.page import report_page, run_plots
from fedveil.report.run_data import load_run
from fedveil.report.tradeoff import Traded, curves, front, line_labels, page, tradeoff_point, write_tradeoff
from tests.report_folders import statement, write_run
from tests.runs import json_lines


def seeds(
    folder: Path, name: str, bests: list[float], epsilon: float | None = 2.5, **more: object
) -> list[Path]:
    return [
        write_run(folder / f"{name}-{s}", name=f"{name}-seed{s}", seed=s, best=best, epsilon=epsilon, **more)  # type: ignore[arg-type]
        for s, best in enumerate(bests)
    ]


def plotted(plots: Sequence[Plot], title: str) -> tuple[Series, ...]:
    """The series of the plot with this title."""
    (found,) = [plot for plot in plots if plot.title == title]
    return found.series


def test_seeds_of_one_experiment_are_averaged(tmp_path: Path) -> None:
    bests = [0.7, 0.8, 0.95]
    comparison = compare(seeds(tmp_path, "avg", bests))
    (row,) = comparison.rows
    finals = [0.1 + (best - 0.1) * (1 - math.exp(-5)) for best in bests]
    assert (row.variant, row.seeds, row.round) == ("avg", 3, 30)
    assert row.metrics["accuracy"].mean == pytest.approx(statistics.fmean(finals), rel=1e-12)
    assert row.metrics["accuracy"].std == pytest.approx(statistics.stdev(finals), rel=1e-12)
    assert row.epsilon == 2.5


def test_one_seed_has_no_deviation(tmp_path: Path) -> None:
    (row,) = compare(seeds(tmp_path, "avg", [0.9])).rows
    assert row.metrics["accuracy"].std is None
    assert str(row.metrics["accuracy"]) == "0.8946"
    assert Spread.from_values([1.0, 3.0]) == Spread(mean=2.0, std=math.sqrt(2.0))


def test_runs_that_differ_in_a_setting_are_never_averaged(tmp_path: Path) -> None:
    runs = [
        *seeds(tmp_path / "a", "avg", [0.8, 0.9], settings="[privacy]\nnoise_multiplier = 5.0\n"),
        *seeds(tmp_path / "b", "avg", [0.7], settings="[privacy]\nnoise_multiplier = 1.0\nclip = 2.0\n"),
    ]
    assert [(row.variant, row.seeds) for row in compare(runs).rows] == [
        ("avg (privacy.noise_multiplier=5.0, no privacy.clip)", 2),
        ("avg (privacy.clip=2.0, privacy.noise_multiplier=1.0)", 1),
    ]


def test_names_of_methods_are_settings_and_seeds_are_not(tmp_path: Path) -> None:
    def run(folder: str, method: str, seed: int) -> Path:
        settings = f"[data]\nseed = {seed}\n[privacy]\ninsecure_seed = {seed}\n[method]\nname = '{method}'\n"
        return write_run(tmp_path / folder, name="one", seed=seed, settings=settings)

    rows = compare([run("a", "uldp-avg", 0), run("b", "uldp-avg", 1), run("c", "uldp-sgd", 0)]).rows
    assert [(row.variant, row.seeds) for row in rows] == [
        ("one (method.name=uldp-avg)", 2),
        ("one (method.name=uldp-sgd)", 1),
    ]


def test_the_same_folder_twice_is_one_run(tmp_path: Path) -> None:
    (run,) = seeds(tmp_path, "avg", [0.9])
    assert compare([run, run]).rows[0].seeds == 1


def test_only_common_rounds_are_averaged(tmp_path: Path) -> None:
    whole = write_run(tmp_path / "0", name="avg-seed0", seed=0, rounds=30)
    short = write_run(tmp_path / "1", name="avg-seed1", seed=1, rounds=12)
    assert compare([whole, short]).rows[0].round == 12


def test_the_epsilon_of_a_variant_holds_for_every_seed(tmp_path: Path) -> None:
    low = write_run(tmp_path / "0", name="group-seed0", seed=0, epsilon=2.0)
    high = write_run(tmp_path / "1", name="group-seed1", seed=1, epsilon=3.0)
    assert compare([low, high]).rows[0].epsilon == 3.0


def test_the_epsilon_of_a_variant_is_that_of_whole_runs(tmp_path: Path) -> None:
    """What is released beside the rounds, or charged after the last one, is in no line of metrics; readers learn it."""
    folder = write_run(tmp_path / "0", name="avg", epsilon=2.0)
    (folder / "privacy.json").write_text(json.dumps(statement(epsilon=3.5)))
    assert compare([folder]).rows[0].epsilon == 3.5
    shown = re.sub("<[^>]+>", " ", report_page(load_run(folder)))
    assert re.search(
        r"for one user, so far\s+[\d.]+\s+2\.00\s+.{0,4}for one user, of the whole run\s+3\.50", shown
    )


def test_pages_with_seconds_say_that_no_guarantee_covers_them(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "0", name="avg")
    pages = (
        compare([folder]).page(),
        report_page(load_run(folder)),
        page([tradeoff_point(folder, "seed")], "seed"),
    )
    for one in pages:
        assert "Seconds and bytes depend on who takes part" in one


def test_one_seed_without_a_guarantee_leaves_none(tmp_path: Path) -> None:
    private = write_run(tmp_path / "0", name="avg-seed0", seed=0)
    broken = write_run(tmp_path / "1", name="avg-seed1", seed=1, epsilon=None)
    (row,) = compare([private, broken]).rows
    assert row.epsilon == math.inf


def test_no_guarantee_is_drawn_at_infinity(tmp_path: Path) -> None:
    comparison = compare(
        [*seeds(tmp_path, "fedavg", [0.95, 0.97], None), *seeds(tmp_path, "avg", [0.8, 0.9])]
    )
    drawn = plotted(comparison.plots, "Privacy and utility: test accuracy against ε")
    lines = [series for series in drawn if series.name]
    assert [series.name for series in lines] == ["avg", "fedavg (ε = ∞)"]
    assert lines[1].dash == "dash"
    assert lines[1].y == (comparison.rows[0].metrics["accuracy"].mean,) * 3
    assert comparison.warnings == ("No privacy guarantee at all: fedavg.",)
    assert "∞ (no guarantee)" in comparison.page()


def test_bands_are_one_deviation_around_the_mean(tmp_path: Path) -> None:
    comparison = compare(seeds(tmp_path, "avg", [0.7, 0.9]))
    band, line = plotted(comparison.plots, "Test accuracy by round")
    assert band.x == line.x == tuple(range(31))
    std = comparison.rows[0].metrics["accuracy"].std
    assert std is not None
    assert band.high[30] - line.y[30] == pytest.approx(std)
    assert line.y[30] - band.low[30] == pytest.approx(std)


def test_a_variant_keeps_its_colour_in_every_plot(tmp_path: Path) -> None:
    comparison = compare([*seeds(tmp_path, "fedavg", [0.95], None), *seeds(tmp_path, "avg", [0.8])])
    by_round = plotted(comparison.plots, "Test accuracy by round")
    by_epsilon = plotted(comparison.plots, "Privacy and utility: test accuracy against ε")
    colours = [
        {series.name.split(" (")[0]: series.colour for series in plot} for plot in (by_round, by_epsilon)
    ]
    assert colours[0] == colours[1]


@pytest.mark.parametrize(("large", "log"), [(40.0, False), (60.0, True)])
def test_a_huge_epsilon_beside_a_small_one_needs_a_logarithmic_axis(
    tmp_path: Path, large: float, log: bool
) -> None:
    runs = [write_run(tmp_path / "0", name="avg"), write_run(tmp_path / "1", name="group", epsilon=large)]
    axes = [plot.x.log for plot in compare(runs).plots if "against ε" in plot.title]
    assert axes == [log, log]


def test_unlike_guarantees_are_not_compared_unsaid(tmp_path: Path) -> None:
    users = write_run(tmp_path / "0", name="avg")
    records = write_run(tmp_path / "1", name="dp-sgd", unit="record")
    (warning,) = compare([users, records]).warnings
    assert warning.startswith("The guarantees are for different units of privacy and different adjacencies")


def test_exact_metrics_of_private_records_are_marked_wherever_they_are_compared(tmp_path: Path) -> None:
    private, public = write_run(tmp_path / "0", name="avg"), write_run(tmp_path / "1", name="open")
    (public / "public_test.json").write_text(json.dumps({"schema_version": 1, "records": 9}))
    both = compare([private, public])
    assert both.coverage.endswith("are exact, not covered by the guarantee: avg.")
    assert both.coverage in both.page()
    assert both.coverage in str(fv.compare(private, public)).replace("\n", " ")
    assert compare([public]).coverage == ""
    for folder, mark in ((private, "test accuracy (exact, not covered)"), (public, "test accuracy")):
        titles = [plot.y.title for plot in run_plots(load_run(folder)) if "accuracy" in plot.title]
        assert set(titles) == {mark}


def test_the_table_for_machines(tmp_path: Path) -> None:
    comparison = compare([*seeds(tmp_path, "fedavg", [0.95], None), *seeds(tmp_path, "avg", [0.8, 0.9])])
    table = json.loads(json.dumps(comparison.to_json(), allow_nan=False))
    assert table["schema_version"] == 1
    assert [row["epsilon"] for row in table["rows"]] == [None, 2.5]
    assert [row["metrics"]["accuracy"]["std"] is None for row in table["rows"]] == [True, False]


def test_a_hostile_name_injects_nothing(tmp_path: Path) -> None:
    hostile = "<script>alert(1)</script>"
    page = compare([write_run(tmp_path / "run", name=hostile)]).write(tmp_path / "c.html").read_text()
    assert hostile not in page
    assert "&lt;script&gt;alert(1)" in page


def test_nothing_to_compare_is_said(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="at least one run folder"):
        compare([])
    folder = write_run(tmp_path / "run")
    (folder / "metrics.jsonl").write_text("")
    with pytest.raises(RunFolderError, match=r"metrics.jsonl has no round yet"):
        compare([folder])


def test_accuracy_is_shown_against_the_bytes_sent(tmp_path: Path) -> None:
    runs = []
    for name, each in (("bytes", 2**18), ("float32", 2**20)):
        folder = write_run(tmp_path / name, name=name, rounds=4, settings=f"text = '{name}'\n")
        communication_cost = {"float32_bytes": 2**20, "bits_per_parameter": each / 2**15}
        communication_cost |= {"limit": None, "acceptance": None}
        first, *rest = json_lines(folder / "metrics.jsonl")
        rows = [first, *(row | {"bytes_up": each, "communication_cost": communication_cost} for row in rest)]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        runs.append(folder)
    comparison = compare([*runs, write_run(tmp_path / "uncounted", name="uncounted", rounds=4)])
    assert [row.bits and row.bits.mean for row in comparison.rows] == [8.0, 32.0, None]
    assert comparison.to_json()["rows"][0]["bits_per_parameter"] == {"mean": 8.0, "std": None}  # type: ignore[index,call-overload]
    lines = plotted(comparison.plots, "Rate and accuracy: test accuracy against the cost of communication")
    assert [line.name for line in lines] == ["bytes", "float32"]
    assert lines[0].x == (0.25, 0.5, 0.75, 1.0)
    assert lines[1].x == (1.0, 2.0, 3.0, 4.0)
    assert "bits per parameter" in comparison.page()


# --- against a key --------------------------------------------------------------------------------------------------


def swept(folder: Path, name: str, settings: str, bests: list[float]) -> list[Traded]:
    """Return runs of one point, a seed each, as the page of `method.clip` reads them."""
    return [tradeoff_point(run, "method.clip") for run in seeds(folder, name, bests, settings=settings)]


def test_a_page_of_a_key_has_a_line_for_each_combination_of_the_other_settings(tmp_path: Path) -> None:
    """One mean over the other axis, methods included, said of neither method what a clip does."""
    runs = [
        run
        for name, sign in (("uldp-avg", 1), ("uldp-sgd", -1))
        for rounds in (10, 20)
        for clip in ("0.5", "1.0")
        for run in swept(
            tmp_path,
            f"{name}-{rounds}-{clip}",
            f"rounds = {rounds}\n[method]\nname = '{name}'\nclip = {clip}\n",
            [0.5 + sign * float(clip) * rounds / 100, 0.5],
        )
    ]
    html = page(runs, "method.clip")
    found = plotted(curves(runs, "method.clip"), "test accuracy against method.clip")
    lines = {one.name: one for one in found}
    assert list(lines) == [
        f"method.name={name}, rounds={rounds}" for name in ("uldp-avg", "uldp-sgd") for rounds in (10, 20)
    ]
    for label, drawn in lines.items():
        assert drawn.x == (0, 1)
        for clip, mean in zip(("0.5", "1.0"), drawn.y, strict=True):
            of_line = [
                run.metrics["accuracy"]
                for run, own in zip(runs, line_labels(runs, "method.clip"), strict=True)
                if own == label and run.value == clip
            ]
            assert len(of_line) == 2
            assert mean == pytest.approx(statistics.fmean(of_line), rel=1e-12)
    assert len({(one.colour, one.dash) for one in lines.values()}) == 4
    assert html.count("One line for each combination of the other settings") == 3
    assert "<th>other settings</th>" in re.sub(r"<th [^>]*>", "<th>", html)


def test_a_page_of_one_key_has_one_line_over_seeds(tmp_path: Path) -> None:
    runs = [
        run
        for clip in ("1.0", "0.5", "10.0")
        for run in swept(tmp_path, f"avg-{clip}", f"[method]\nclip = {clip}\n", [0.5, float(clip) / 20])
    ]
    html = page(runs, "method.clip")
    (plot,) = [one for one in curves(runs, "method.clip") if one.title.startswith("test accuracy")]
    (drawn,) = plot.series
    assert (drawn.name, drawn.x) == ("test accuracy", (0, 1, 2))
    assert plot.x.categories == ("0.5", "1.0", "10.0")
    assert "other settings" not in html


@pytest.mark.parametrize(
    ("key", "documents", "labels"),
    [
        pytest.param(
            "local.batch_size",
            [
                "[local]\nbatch_size = 8\n[trainer]\nname = 'gram'",
                "[local]\nbatch_size = 64\n[trainer]\nname = 'loop'",
            ],
            ["", ""],
            id="a trainer that the run chose",
        ),
        pytest.param(
            "local.batch_size",
            [
                f"[local]\nbatch_size = {size}\n[trainer]\nname = '{name}'"
                for name in ("loop", "vmap")
                for size in (8, 64)
            ],
            ["trainer.name=loop", "trainer.name=loop", "trainer.name=vmap", "trainer.name=vmap"],
            id="a trainer that is swept",
        ),
        pytest.param(
            "method.name",
            ["[method]\nname = 'uldp-avg'", "[method]\nname = 'uldp-avg-w'\npower = 1.0"],
            ["", ""],
            id="keys that a method brings",
        ),
        pytest.param(
            "method.name",
            ["[method]\nname = 'uldp-sgd'", "[method]\nname = 'uldp-avg'\n[local]\nepochs = 2"],
            ["", ""],
            id="local training that a method brings",
        ),
        pytest.param(
            "method.name",
            ["[method]\nname = 'uldp-avg'\nclip = 0.5", "[method]\nname = 'uldp-avg-w'\nclip = 1.0"],
            ["method.clip=0.5", "method.clip=1.0"],
            id="another value of a key of both methods",
        ),
        pytest.param(
            "data.allocation.law",
            [
                "[data]\nname = 'digits'",
                "[data.allocation]\nlaw = 'uniform'\nmain_share = 0.8\n[data]\nname = 'digits'",
            ],
            ["", ""],
            id="a table that is left out",
        ),
        pytest.param(
            "rounds",
            ["rounds = 1", "rounds = 2\n[server.average]\nname = 'tail'"],
            ["no server.average.name", "server.average.name=tail"],
            id="a table that one run alone has",
        ),
        pytest.param(
            "method.clip",
            ["[method]\nclip = 0.5", "[method]\nclip = 1.0\nlattice = 'Z1'"],
            ["no method.lattice", "method.lattice=Z1"],
            id="a key that one run alone has",
        ),
        pytest.param(
            "seed",
            ["[method]\nclip = 0.5", "[method]\nclip = 1.0"],
            ["method.clip=0.5", "method.clip=1.0"],
            id="seeds",
        ),
    ],
)
def test_what_follows_from_the_key_makes_no_line_of_its_own(
    key: str, documents: list[str], labels: list[str], tmp_path: Path
) -> None:
    runs = [
        tradeoff_point(write_run(tmp_path / str(number), name=f"run-{number}", settings=f"{text}\n"), key)
        for number, text in enumerate(documents)
    ]
    assert line_labels(runs, key) == labels
    assert page(runs, key)


def test_a_key_that_a_run_leaves_out_with_its_table_is_drawn_as_left_out(tmp_path: Path) -> None:
    """A sweep over data.allocation.law=zipf,uniform ran to its end and was then refused its page: zipf is left out."""
    usual = write_run(tmp_path / "0", name="a", settings="[data]\nname = 'digits'\n")
    other = write_run(
        tmp_path / "1", name="b", settings="[data]\nname = 'digits'\nallocation.law = 'uniform'\n"
    )
    written = write_tradeoff([usual, other, usual], "data.allocation.law", tmp_path / "page.html")
    assert ">left out</text>" in written.read_text()
    runs = [tradeoff_point(folder, "data.allocation.law") for folder in (usual, other)]
    assert curves(runs, "data.allocation.law")[0].x.categories == ("left out", "uniform")
    for folders, key in (
        ([usual], "data.allocation.law"),
        ([usual, other], "data.n_silos"),
        ([usual, other], "no"),
    ):
        with pytest.raises(RunFolderError, match=rf"no key {key}"):
            write_tradeoff(folders, key, tmp_path / "page.html")


def test_a_smaller_error_is_better_and_runs_may_have_other_metrics() -> None:
    runs = [
        Traded(run=name, value=name, metrics=metrics, seconds=1.0, mebibytes=None)
        for name, metrics in (("a", {"mae": 1.0}), ("b", {"mae": 2.0}), ("c", {"auc": 0.5}))
    ]
    assert [run.run for run in front(runs, "mae", "seconds")] == ["a"]
    assert "Not beaten: a (rounds = a)" in page(runs, "rounds")
