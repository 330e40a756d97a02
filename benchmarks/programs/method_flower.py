import numpy as np
from flwr.app import Array, ArrayRecord
from flwr.serverapp.strategy import FedAvg


class ByRecords(FedAvg):
    def __init__(self, *, clip, noise_multiplier, most, **given):
        super().__init__(**given)
        self.clip, self.std, self.most = clip, noise_multiplier * clip, most
        self.random = np.random.default_rng()

    def configure_train(self, server_round, arrays, config, grid):
        self.before = arrays.to_numpy_ndarrays()
        return super().configure_train(server_round, arrays, config, grid)

    def aggregate_train(self, server_round, replies):
        replies, total = list(replies), [self.random.normal(0.0, self.std, one.shape) for one in self.before]
        for reply in replies:
            after = reply.content["arrays"].to_numpy_ndarrays()
            update = [new - old for new, old in zip(after, self.before, strict=True)]
            length = np.sqrt(sum((part**2).sum() for part in update))
            weight = min(1.0, reply.content["metrics"]["num-examples"] / self.most)
            factor = weight * min(1.0, self.clip / max(length, 1e-12))
            total = [one + factor * part for one, part in zip(total, update, strict=True)]
        names = reply.content["arrays"].keys()
        moved = [
            (old + one / len(replies)).astype(np.float32) for old, one in zip(self.before, total, strict=True)
        ]
        return ArrayRecord(dict(zip(names, map(Array, moved), strict=True))), None
