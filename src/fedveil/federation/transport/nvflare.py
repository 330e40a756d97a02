"""A privacy filter for NVFlare FedAvg jobs: clip and noise what a site sends, and account for it over all jobs.

    task data filter    ReceivedModelFilter   keeps the model that the server sent with a task
    task result filter  SiloPrivacyFilter     sends  update' = clip(after - before, C) + N(0, (z C)^2 I)  in its place

Claim: what leaves in the place of a task's result is an update that :class:`~.silo_account.SiloAccount` released,
whose claim it is (the unit of privacy is the silo, such as a hospital), and public data beside it:

* Names, shapes and types of the arrays come from the server's model alone; arrays of whole numbers are sent as they
  were received. The number of steps is 1 for every site: FedAvg would otherwise weigh by the number of records.
* Everything else in a result (metrics, headers, counts) is dropped. What is no update of the model, or cannot be
  charged, does not leave: the server gets a return code in its place.

Not claimed: :data:`~.silo_account.UNCOVERED`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from jaxtyping import Float64
from nvflare.apis.dxo import DXO, DataKind, MetaKey, from_shareable
from nvflare.apis.filter import Filter
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable, make_reply
from nvflare.app_common.app_constant import AppConstants
from torch import Tensor

from fedveil.errors import FedveilError, ModelError
from fedveil.federation.transport.silo_account import SiloAccount

_RECEIVED: Final = "fedveil.received_model"
_CODES: Final = [code for name, code in vars(ReturnCode).items() if name.isupper()]

Arrays = dict[str, Any]


class ReceivedModelFilter(Filter):  # type: ignore[misc]
    """Task data filter: keeps a copy of the model that the server sent, for :class:`SiloPrivacyFilter`.

    A copy, because trainers change the arrays that they are given. It lasts for the task.
    """

    def process(self, shareable: Shareable, fl_ctx: FLContext) -> Shareable:
        """Return the task's data unchanged."""
        fl_ctx.set_prop(_RECEIVED, _model_of(shareable), private=True, sticky=False)
        return shareable


class SiloPrivacyFilter(Filter):  # type: ignore[misc]
    """Task result filter: clips and noises a silo's update, for differential privacy of the silo's whole data set.

    Each result that leaves is charged to the folder's ledger, over all jobs. A result beyond the budget does not
    leave.

    ====================================  ===================================================================
    result of a task                      what leaves
    ====================================  ===================================================================
    WEIGHTS or WEIGHT_DIFF of the model   the clipped and noisy update, of the same kind
    an update with NaN or infinity        noise alone, which is charged
    arrays of whole numbers               as the server sent them (a difference of 0)
    other names or shapes                 TASK_RESULT_FILTER_ERROR; nothing is charged
    metrics, collections, anything else   TASK_RESULT_FILTER_ERROR; nothing is charged
    a task without a model                TASK_RESULT_FILTER_ERROR; nothing is charged
    another return code than OK           the return code alone
    a charge above the budget             TASK_RESULT_FILTER_ERROR, in this job and all others
    a ledger that is missing or damaged   TASK_RESULT_FILTER_ERROR, until it is restored
    ====================================  ===================================================================

    Args:
        folder: folder of ledger and statement, this silo's alone; has an empty ``ledger.jsonl`` at first. ``{site}`` in
            it stands for the site's name in NVFlare.
        clip: C, l2 norm of an update, in the unit of the parameters.
        noise_multiplier: z; the noise has the standard deviation z C in every coordinate.
        epsilon: budget over all jobs.
        delta: delta of the budget.

    Raises:
        PrivacyError: a number outside its domain.
    """

    def __init__(
        self, folder: str, clip: float, noise_multiplier: float, epsilon: float, delta: float
    ) -> None:
        super().__init__()
        self._folder = folder
        self._account = SiloAccount(
            clip=clip, noise_multiplier=noise_multiplier, epsilon=epsilon, delta=delta
        )

    def process(self, shareable: Shareable, fl_ctx: FLContext) -> Shareable:
        """Return the message that leaves the site in place of a result.

        NVFlare's own DXOFilter lets through every result that has another return code, or is no DXO. Hence a Filter.
        """
        try:
            code = shareable.get_return_code()
            if code != ReturnCode.OK:
                # A code of the job's own could say anything about the data.
                return make_reply(code if code in _CODES else ReturnCode.EXECUTION_EXCEPTION)
            dxo = self._release(from_shareable(shareable), fl_ctx)
            return dxo.update_shareable(_with_round(fl_ctx))
        except Exception as error:  # NVFlare would log the text of an error that leaves the filter
            self.log_error(
                fl_ctx, f"fedveil: this silo's result does not leave: {_explain(error)}", fire_event=False
            )
            return make_reply(ReturnCode.TASK_RESULT_FILTER_ERROR)

    def _release(self, dxo: DXO, fl_ctx: FLContext) -> DXO:
        """Return the clipped and noisy update, after it was charged.

        Raises:
            ModelError: no model was received, or the result is no update of it.
            BudgetError: the charge would exceed the budget.
            RunFolderError: the ledger or the statement cannot be read or written.
        """
        received = fl_ctx.get_prop(_RECEIVED)
        if not isinstance(received, _Received):
            raise ModelError(
                "no model came with the task; add ReceivedModelFilter to the task_data_filters, and let tasks that "
                "train be the only ones of the job"
            )
        update = received.update_in(dxo)
        folder = Path(self._folder.replace("{site}", fl_ctx.get_identity_name()))
        noisy, statement = self._account.release(folder, str(fl_ctx.get_job_id()), update)
        self.log_info(
            fl_ctx,
            f"fedveil: charged for this whole silo, not for a patient: {statement.short}",
            fire_event=False,
        )
        moved = received.moved_by(noisy, is_difference=dxo.data_kind == DataKind.WEIGHT_DIFF)
        return DXO(dxo.data_kind, data=moved, meta={MetaKey.NUM_STEPS_CURRENT_ROUND: 1})


# --- the update ----------------------------------------------------------------------------------------------------


class _Received:
    """Model of a task as the server sent it.

    Args:
        arrays: NumPy arrays or tensors by name; copied.
        number: number of the round, as the server wrote it.
    """

    def __init__(self, arrays: Mapping[str, Any], number: Any) -> None:
        self.number = number
        self._arrays = {name: _as_tensor(name, array).clone() for name, array in arrays.items()}
        self._moving = [name for name, array in self._arrays.items() if torch.is_floating_point(array)]
        self._tensors = {name for name, array in arrays.items() if isinstance(array, Tensor)}

    def update_in(self, dxo: DXO) -> Tensor:
        """Return a result's update as one float32 row, arrays in the order of the received model.

        Raises:
            ModelError: another kind of result, or other names or shapes than the received model's.
        """
        if dxo.data_kind not in (DataKind.WEIGHTS, DataKind.WEIGHT_DIFF):
            raise ModelError("the result is no DXO of kind WEIGHTS or WEIGHT_DIFF")
        if set(dxo.data) != set(self._arrays):
            raise ModelError("the result has other arrays than the model that the server sent")
        row, begin = torch.empty(1, sum(self._arrays[name].numel() for name in self._moving)), 0
        for name, before in self._arrays.items():
            after = _as_tensor(name, dxo.data[name])
            if after.shape != before.shape:
                raise ModelError(f"array {name!r}: the server sent the shape {tuple(before.shape)}")
            if not torch.is_floating_point(before):
                continue
            after = after.double()
            moved = after if dxo.data_kind == DataKind.WEIGHT_DIFF else after - before.double()
            row[0, begin : begin + before.numel()] = moved.reshape(-1).float()
            begin += before.numel()
        return row

    def moved_by(self, update: Float64[np.ndarray, " d"], *, is_difference: bool) -> Arrays:
        """Return the received arrays + update, or the update alone, in the received types and shapes."""
        result: Arrays = {}
        begin = 0
        for name, before in self._arrays.items():
            if torch.is_floating_point(before):
                part = torch.from_numpy(update[begin : begin + before.numel()]).reshape(before.shape)
                begin += before.numel()
                after = (part if is_difference else before.double() + part).to(before.dtype)
            else:
                after = torch.zeros_like(before) if is_difference else before.clone()
            result[name] = after if name in self._tensors else after.numpy()
        return result


def _model_of(shareable: Shareable) -> _Received | None:
    """Return the model of a task's data; None if it has none that can be read."""
    try:
        dxo = from_shareable(shareable)
        if dxo.data_kind == DataKind.WEIGHTS and dxo.data:
            return _Received(dxo.data, shareable.get_header(AppConstants.CURRENT_ROUND))
    except Exception:  # of torch, say, for an array that it does not read: NVFlare would log the error's text
        return None
    return None


def _as_tensor(name: str, array: Any) -> Tensor:
    if isinstance(array, Tensor):
        return array.detach().cpu()
    # Names of types are the model's; a value of the array is never shown.
    if not isinstance(array, np.ndarray | np.generic) or array.dtype.kind not in "fiub":
        raise ModelError(f"array {name!r}: a NumPy array or a tensor of real numbers is needed")
    try:
        return torch.as_tensor(np.ascontiguousarray(array).reshape(array.shape))
    except TypeError as error:
        raise ModelError(f"array {name!r}: its type {array.dtype} is not supported") from error


def _with_round(fl_ctx: FLContext) -> Shareable:
    """Return an empty result that has the round's number, as the server wrote it."""
    result = Shareable()
    received = fl_ctx.get_prop(_RECEIVED)
    if isinstance(received.number, int):
        result.set_header(AppConstants.CURRENT_ROUND, received.number)
    return result


def _explain(error: Exception) -> str:
    """Return the text of an error of fedveil, and the name alone of any other, which may quote a value."""
    return str(error) if isinstance(error, FedveilError) else type(error).__name__
