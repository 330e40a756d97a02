"""Write the file of main silos of a simulation, and state its digest.

Between institutions the silos share a file that names each user's main silo (:mod:`fedveil.data.main_silos`), and the
statement names the file's digest. With ``method.power = "linked"`` a simulation plays that: it writes such a file into
the run folder, with a salt of its own, and its statement names the digest of this file. The file names every user's
main silo, so it is as private as the records.
"""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import replace

import numpy as np

from fedveil.errors import ConfigError, RunFolderError
from fedveil.files import read_content
from fedveil.run.folder.run_folder import RunFolder
from fedveil.run.setup import Prepared

FILE = "main_silos.csv"


def write_main_silos(prepared: Prepared, folder: RunFolder) -> Prepared:
    """Return the run with the digest of its file of main silos; write the file if the folder has none yet.

    A run without ``power = "linked"`` is returned as it is; so is one whose population brings the file that it names.

    Raises:
        ConfigError: the run names a file by its digest, which a simulation does not read.
        RunFolderError: the run has begun and its file is lost or changed.
    """
    weights = prepared.method.weights
    if weights.law != "declared" or not prepared.population.complete:
        return prepared
    declared = prepared.population.main_silos
    if declared is not None and declared.digest == weights.digest:
        return prepared
    if not weights.linked:
        raise ConfigError(
            "method.power: a file of main silos is shared between institutions, and a simulation reads none; "
            "power = 'linked' writes one into the run folder"
        )
    lines = _lines(prepared)
    if not (folder / FILE).exists():
        if (folder / "metrics.jsonl").exists():
            raise RunFolderError(f"{folder / FILE} is missing, and the run's statement names it; put it back")
        folder.write(FILE, f"{secrets.token_hex(32)}\n{lines}".encode())
    content = read_content(folder / FILE, RunFolderError)
    if content.decode(errors="replace").partition("\n")[2] != lines:
        raise RunFolderError(f"{folder / FILE} is not of these records; put back the file of the run")
    found = weights.with_file(hashlib.sha256(content).hexdigest())
    method = replace(prepared.method, weights=found)
    before, after = weights.uncovered_facts(prepared.method), found.uncovered_facts(method)
    named = dict(zip(before, after, strict=True))
    guarantee = prepared.guarantee
    return replace(
        prepared,
        setting=replace(prepared.setting, method=method),
        guarantee=replace(guarantee, uncovered=tuple(named.get(one, one) for one in guarantee.uncovered)),
        uncovered=tuple(named.get(one, one) for one in prepared.uncovered),
    )


def _lines(prepared: Prepared) -> str:
    """Return a line for every user: the number, a comma, and the name of the main silo.

    Users without records get the first silo: the line of a user depends on the user's own records alone.
    """
    population, groups = prepared.population, prepared.setting.cohort.groups
    main = np.zeros(population.n_users, dtype=np.int64)
    chosen = prepared.setting.weights.numpy() == 1
    main[groups.user[chosen]] = groups.silo[chosen]
    return "".join(f"{user},{population.silo_names[silo]}\n" for user, silo in enumerate(main.tolist()))
