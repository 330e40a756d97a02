"""The process that Flower starts at a silo for every message: it runs fedveil's app, whatever app it was sent.

A SuperLink sends a SuperNode the app to run, as a bundle of files, and Flower would run any. Here the bundle is looked
at first: it may name fedveil's own ClientApp and hold no file of code. ``fedveil silo`` puts this program in the place
of Flower's ``flwr-clientapp``, and nothing in the place of the programs for other kinds of apps.
"""

from __future__ import annotations

import io
import shlex
import sys
import tomllib
import zipfile
import zlib
from pathlib import Path
from typing import Final

from fedveil.errors import FedveilError
from fedveil.foreign import foreign

CLIENT_APP: Final = "fedveil.flower.client_app:app"
_FILES: Final = {"pyproject.toml", ".info/CONTENT"}
_LARGEST_BUNDLE: Final = 1 << 16
_OTHERS: Final = ("flwr-agentapp", "flwr-connector", "flwr-model", "flwr-serverapp", "flwr-simulation")


class ForeignAppError(FedveilError):
    """The coordinator's host sent an app that is not fedveil's own, or that brings code."""


def check_bundle(content: bytes) -> None:
    """Return if a bundle names fedveil's ClientApp and holds no code.

    Raises:
        ForeignAppError: too long, no bundle, another file than the two that describe it, or another app.
    """
    if len(content) > _LARGEST_BUNDLE:
        raise ForeignAppError(
            f"an app of {len(content)} bytes; fedveil's own has less than {_LARGEST_BUNDLE}"
        )
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as bundle:
            files = bundle.infolist()
            names = sorted(file.filename for file in files)
            if set(names) != _FILES or len(names) != len(_FILES):
                raise ForeignAppError(
                    f"the app that was sent brings files of its own: {foreign(', '.join(names))}"
                )
            if max(file.file_size for file in files) > _LARGEST_BUNDLE:
                raise ForeignAppError("a file of the app that was sent is too long")
            document = tomllib.loads(bundle.read("pyproject.toml").decode())
        named = document["tool"]["flwr"]["app"]["components"]["clientapp"]
    except (zipfile.BadZipFile, ValueError, KeyError, TypeError, EOFError, RuntimeError, zlib.error) as error:
        raise ForeignAppError(f"the app that was sent is damaged ({type(error).__name__})") from None
    if named != CLIENT_APP:
        raise ForeignAppError(f"the app that was sent is not {CLIENT_APP}")


def write_programs(folder: Path) -> Path:
    """Write the programs that Flower's processes at a silo find before its own; return their folder."""
    folder.mkdir(parents=True, exist_ok=True)
    own = f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m fedveil.flower.app_process "$@"\n'
    for name, text in (("flwr-clientapp", own), *((other, "#!/bin/sh\nexit 1\n") for other in _OTHERS)):
        path = folder / name
        path.write_text(text, encoding="utf-8")
        path.chmod(0o700)
    return folder


def main() -> None:
    """Be ``flwr-clientapp``, with a look at the bundle before it is installed."""
    from flwr.app import Context, Message
    from flwr.supercore.fab import Fab
    from flwr.supercore.run import Run
    from flwr.supercore.runtime import RuntimeHttpClient
    from flwr.supernode.cli import flwr_clientapp
    from flwr.supernode.runtime import run_clientapp

    pull = run_clientapp.pull_task_input

    def checked(client: RuntimeHttpClient) -> tuple[Message, Context, Run, Fab]:
        message, context, run, fab = pull(client)
        check_bundle(fab.content)
        return message, context, run, fab

    run_clientapp.pull_task_input = checked
    flwr_clientapp()


if __name__ == "__main__":
    main()
