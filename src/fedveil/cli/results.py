"""Commands that read run folders and bundles: report, use, check and attack what a run made."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedveil.checks import Verification
from fedveil.cli.options import (
    OUT,
    Code,
    FigureFormats,
    Figures,
    Json,
    check_writable,
    expand_option_groups,
    print_frame,
    print_result,
)
from fedveil.console import print_json, rows_table
from fedveil.errors import ConfigError, IntegrityError

if TYPE_CHECKING:
    from fedveil.run.config.release_document import TableDocument


def report_command(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="a run folder")],
    without_privacy: Annotated[
        Path | None,
        typer.Option(metavar="RUN", help="a run without a guarantee on the same data, to compare with"),
    ] = None,
    with_spectrum: Annotated[
        bool, typer.Option("--with-spectrum", help="show how far the model moved, by frequency")
    ] = False,
    figures: Figures = None,
    figure_formats: FigureFormats = "svg,csv",
    as_json: Json = False,
) -> None:
    """Write a run's self-contained report again, and its plots as files."""
    from fedveil.report.figure_files import write_figures
    from fedveil.report.page import run_plots, write_report
    from fedveil.report.run_data import load_run

    path = write_report(folder, without_privacy=without_privacy, with_spectrum=with_spectrum)
    written = (
        []
        if figures is None
        else write_figures(run_plots(load_run(folder)), figures, figure_formats.split(","))
    )
    print_result(
        as_json,
        {"report": path, "figures": written},
        f"report: {path}",
        *(f"figure: {figure}" for figure in written),
    )


def compare_command(
    folders: Annotated[list[Path], typer.Argument(metavar="RUN...", help="run folders, or folders of them")],
    page: Annotated[Path, typer.Option(help="where the page is written")] = Path("comparison.html"),
    against: Annotated[
        str | None, typer.Option(help="a key: draw results and costs against it, with the Pareto front")
    ] = None,
    figures: Figures = None,
    figure_formats: FigureFormats = "svg,csv",
    as_json: Json = False,
) -> None:
    """Compare runs: a table with the standard deviation over seeds, and a page of privacy-utility curves."""
    from fedveil.api.run_folders import compare

    comparison = compare(*folders)
    if figures is not None:
        comparison.figures(figures, against=against, formats=figure_formats.split(","))
    if against is not None:
        written = comparison.write(page, against=against)
        print_result(as_json, {"page": written}, f"comparison: {written}")
        return
    print_frame(comparison, as_json)
    if not as_json:
        OUT.print(f"comparison: {comparison.write(page)}")


def spent_command(
    folders: Annotated[list[Path], typer.Argument(metavar="RUN...", help="run folders over the same people")],
    delta: Annotated[
        float | None, typer.Option(help="delta of the sum; default: that of the runs, if it is the same")
    ] = None,
    accountant: Annotated[str, typer.Option(help="pld, rdp or rdp-2017")] = "pld",
    as_json: Json = False,
) -> None:
    """Calculate what several runs over the same people cost together."""
    from fedveil.api.run_folders import spent

    print_frame(spent(*folders, delta=delta, accountant=accountant), as_json)


# --- folders of releases ---


def kind_of(folder: Path) -> type[TableDocument] | None:
    """Return the kind of releases in a folder; None for a run that trains."""
    from fedveil.run.config.release_document import InferenceDocument, ReleaseDocument

    kinds: tuple[type[TableDocument], ...] = (ReleaseDocument, InferenceDocument)
    return next((kind for kind in kinds if (folder / kind.file).exists()), None)


def printer_of(kind: type[TableDocument]) -> Callable[[Path, bool], None]:
    """Return the function that prints a folder of this kind of releases."""
    from fedveil.cli.statistics import print_inference, print_release
    from fedveil.run.config.release_document import ReleaseDocument

    return print_release if kind is ReleaseDocument else print_inference


def resume_release(folder: Path, kind: type[TableDocument], as_json: bool) -> None:
    """Make the releases that a folder lacks if it was interrupted before, and print what they show."""
    from fedveil.run.config.release_document import read_releases
    from fedveil.run.releases.requests import prepare_document
    from fedveil.run.simulation import resume_releases

    resume_releases(prepare_document(read_releases(folder / kind.file, kind)), folder)
    printer_of(kind)(folder, as_json)


# --- checks of runs, bundles and exported ledgers ---


def verify_command(
    made: Annotated[
        Path,
        typer.Argument(
            metavar="PATH",
            help="folder of a run or release, a bundle (folder or .zip), or an exported ledger (.json)",
        ),
    ],
    trust: Annotated[
        list[str] | None,
        typer.Option(help="public key that must have signed a bundle or an export (may be repeated)"),
    ] = None,
    charter: Annotated[
        Path | None, typer.Option(help="to verify a run: the federation's charter, as it was handed to you")
    ] = None,
    membership: Annotated[
        Path | None, typer.Option(help="to verify an export: the sealed membership of silo and coordinator")
    ] = None,
    ledger: Annotated[
        list[Path] | None, typer.Option(help="ledger that a silo of the run exported (may be repeated)")
    ] = None,
    as_json: Json = False,
) -> None:
    """Verify a run, bundle or exported ledger (bytes, signatures, chains, epsilon); list what cannot be checked."""
    verification = _verified(made, trust or [], (charter, membership), ledger or [])
    rows = [
        {"check": check.name, "outcome": check.outcome, "": check.detail} for check in verification.checks
    ]
    checks = [asdict(check) for check in verification.checks]
    failed = [check for check in verification.checks if check.outcome == "fails"]
    n_held = sum(check.outcome == "holds" for check in verification.checks)
    closing = (
        f"{len(failed)} of {n_held + len(failed)} checks fail."
        if failed
        else f"All {n_held} checks hold. What is unchecked cannot be shown by these files."
    )
    print_result(
        as_json, {"path": made, "holds": verification.holds, "checks": checks}, rows_table(rows), closing
    )
    if failed:
        raise IntegrityError(f"{verification.path}: {failed[0].name}: {failed[0].detail}")


def _verified(
    folder_or_file: Path, trust: list[str], trusted: tuple[Path | None, Path | None], ledgers: list[Path]
) -> Verification:
    from fedveil.bundle.verification import verify_bundle
    from fedveil.federation.audit.ledger_audit import verify_ledger
    from fedveil.federation.audit.recorded_run import verify_run
    from fedveil.federation.terms import DOCUMENTS

    if not folder_or_file.exists():
        raise ConfigError(f"{folder_or_file}: there is no such folder or file")
    charter, membership = trusted
    for option, path in (
        ("--charter", charter),
        ("--membership", membership),
        *(("--ledger", ledger) for ledger in ledgers),
    ):
        if path is not None and not path.is_file():
            raise ConfigError(f"{option} {path}: there is no such file")
    options = {"--trust": trust, "--charter": charter, "--membership": membership, "--ledger": ledgers}
    if any((folder_or_file / name).is_file() for name in DOCUMENTS):
        _refuse(options, "a run folder", {"--charter", "--ledger"})
        return verify_run(folder_or_file, charter, ledgers)
    if folder_or_file.suffix == ".json":
        _refuse(options, "an exported ledger", {"--trust", "--membership"})
        return verify_ledger(folder_or_file, trust, membership)
    _refuse(options, "a bundle", {"--trust", "--charter"})
    return verify_bundle(folder_or_file, trust, charter)


def _refuse(options: Mapping[str, object], subject: str, accepted: set[str]) -> None:
    for name, value in options.items():
        if value and name not in accepted:
            names = " and ".join(sorted(accepted)) or "none of these options"
            raise ConfigError(f"{name}: {subject} is checked without it; it takes {names}")


# --- attacks ------------------------------------------------------------------------------------------------
# The command that attacks a run.


def audit_command(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="folder of a run that has ended")],
    canaries: Annotated[
        int,
        typer.Option(min=0, help="units inserted in the one-run audit, which trains once more; 0 skips it"),
    ] = 200,
    code: Code = None,
    as_json: Json = False,
) -> None:
    """Attack a run: membership inference, and a lower bound on epsilon that may refute the stated one."""
    from fedveil.api.run_folders import audit

    result = audit(folder, canaries=canaries, code=code or ())
    if as_json:
        print_json(result.to_json())
        return
    for line in result.lines:
        style = {result.refutation: "bold red", f"WARNING: {result.unlike}": "bold yellow"}.get(line)
        OUT.print(line, style=style)
    OUT.print(f"report: {result.report}")


# --- bundles: a trained model in use ---


BundlePath = Annotated[Path, typer.Argument(metavar="BUNDLE", help="a bundle: a folder or a .zip")]
Network = Annotated[
    str | None,
    typer.Option("--model", help="package.module:factory that the bundle names: allows its code to run"),
]


def bundle_command(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="a run folder")],
    output: Annotated[Path, typer.Option("--output", "-o", help="a new folder, or a new .zip")],
    about: Annotated[str, typer.Option(help="for the model card: what the model is for, and for whom")] = "",
    code: Code = None,
    as_json: Json = False,
) -> None:
    """Pack a run's model, schema, statement and ledger into one folder or zip, for use elsewhere."""
    from fedveil.bundle.writing import bundle_run

    path = bundle_run(run, output, about=about, code=code or ())
    print_result(as_json, {"bundle": path}, f"bundle: {path}")


@dataclass(frozen=True, kw_only=True)
class TableOptions:
    """What is read of a table of new records, and how."""

    keep: Annotated[list[str] | None, typer.Option(help="column to carry over (may be repeated)")] = None
    file_format: Annotated[
        list[str] | None,
        typer.Option(
            "--format",
            metavar="KEY=VALUE",
            help="how the table is written, if no file of its name is declared in the schema: delimiter=';', "
            "decimal=, or date=%d.%m.%Y (may be repeated)",
        ),
    ] = None


@expand_option_groups
def predict_command(
    bundle: BundlePath,
    table: Annotated[
        Path, typer.Argument(metavar="TABLE", help="a table of new records: .csv, .parquet or Excel")
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="a .parquet or .csv to write")],
    reading: TableOptions,
    network: Network = None,
    as_json: Json = False,
) -> None:
    """Predict for every record of a table."""
    from fedveil.bundle.bundle import load_bundle, write_table

    _refuse_read("--output", output, (bundle, table))
    check_writable("--output", output)
    columns = tuple(dict.fromkeys(reading.keep or ()))
    declared = None if reading.file_format is None else dict(map(_format_key, reading.file_format))
    predictions = load_bundle(bundle, network).predict_table(table, columns, declared)
    write_table(predictions, output, columns)
    document = {"output": output, "records": predictions.num_rows, "columns": predictions.column_names}
    print_result(as_json, document, f"{predictions.num_rows} records: {output}")


def _format_key(text: str) -> tuple[str, str]:
    """Return key and value of ``--format KEY=VALUE``."""
    key, equals, value = text.partition("=")
    if not equals:
        raise ConfigError(f"--format {text}: expected KEY=VALUE, for instance delimiter=';'")
    return key.strip(), value


def export_command(
    bundle: BundlePath,
    onnx: Annotated[Path | None, typer.Option(help="write the model as ONNX (extra: onnx)")] = None,
    torch: Annotated[Path | None, typer.Option(help="write the tensors as torch.load reads them")] = None,
    network: Network = None,
    as_json: Json = False,
) -> None:
    """Write a bundle's model for other programs."""
    from fedveil.bundle.bundle import load_bundle
    from fedveil.bundle.export import export_onnx, export_torch

    if onnx is None and torch is None:
        raise ConfigError("export: give --onnx FILE or --torch FILE")
    for option, path in {"--onnx": onnx, "--torch": torch}.items():
        _refuse_read(option, path, (bundle,))
    read = load_bundle(bundle, network)
    paths = [*([export_onnx(read, onnx)] if onnx else []), *([export_torch(read, torch)] if torch else [])]
    print_result(as_json, {"written": paths}, *paths)


def sign_command(
    bundle: BundlePath,
    key: Annotated[Path, typer.Option(help="an Ed25519 key (PEM, mode 0600), such as a silo's identity")],
    new: Annotated[bool, typer.Option("--new-key", help="make the key first")] = False,
    as_json: Json = False,
) -> None:
    """Sign a bundle that you made or have checked."""
    from fedveil.bundle.manifest import sign
    from fedveil.crypto.keys import IdentityKey

    if new:
        IdentityKey.generate().save(key)
    elif not key.exists():
        raise ConfigError(f"--key {key}: no such file; --new-key makes the key first")
    identity = IdentityKey.load(key)
    sign(bundle, identity)
    public = identity.public.raw.hex()
    print_result(as_json, {"signed": bundle, "key": public}, f"signed by {public}")


def _refuse_read(option: str, path: Path | None, read: Sequence[Path]) -> None:
    """Refuse to write over what a command reads.

    Raises:
        ConfigError: names the option and the file.
    """
    if path is not None and any(path.resolve() == file.resolve() for file in read):
        raise ConfigError(f"{option} {path}: is what the command reads; give another name")
