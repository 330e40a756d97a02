"""Commands for a trained model in use: bundle, predict, export, sign."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from fedveil.cli.options import Code, Json, check_writable, print_result
from fedveil.errors import ConfigError

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

    made = bundle_run(run, output, about=about, code=code or ())
    print_result(as_json, {"bundle": made}, f"bundle: {made}")


def predict_command(
    bundle: BundlePath,
    table: Annotated[
        Path, typer.Argument(metavar="TABLE", help="a table of new records: .csv, .parquet or Excel")
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="a .parquet or .csv to write")],
    keep: Annotated[list[str] | None, typer.Option(help="column to carry over (may be repeated)")] = None,
    network: Network = None,
    as_json: Json = False,
) -> None:
    """Predict for every record of a table."""
    from fedveil.bundle.bundle import load_bundle, write_table

    _refuse_read("--output", output, (bundle, table))
    check_writable("--output", output)
    kept = tuple(dict.fromkeys(keep or ()))
    made = load_bundle(bundle, network).predict_table(table, kept)
    write_table(made, output, kept)
    found = {"output": output, "records": made.num_rows, "columns": made.column_names}
    print_result(as_json, found, f"{made.num_rows} records: {output}")


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
    made = [*([export_onnx(read, onnx)] if onnx else []), *([export_torch(read, torch)] if torch else [])]
    print_result(as_json, {"written": made}, *made)


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
    if path is not None and any(path.resolve() == one.resolve() for one in read):
        raise ConfigError(f"{option} {path}: is what the command reads; give another name")
