import numpy as np
import torch
from dp_accounting.dp_event import GaussianDpEvent, SelfComposedDpEvent
from dp_accounting.pld import PLDAccountant
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import DifferentialPrivacyServerSideFixedClipping, FedAvg
from flwr.simulation import run_simulation

NOISE, ROUNDS, PEOPLE = 1.0, 1, 100
X, y, user, silo = np.load("records.npz").values()
features, targets = torch.from_numpy(X), torch.from_numpy(y)
user[:100] = -1  # new records, of nobody
client, server = ClientApp(), ServerApp()


def network():
    return torch.nn.Linear(3, 2)


@client.train()
def train(message, context):
    model = network()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mine = torch.from_numpy(np.flatnonzero(user == context.node_config["partition-id"]))
    for _ in range(5 if len(mine) else 0):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(features[mine]), targets[mine]).backward()
        optimizer.step()
    arrays = ArrayRecord(model.state_dict())
    metrics = MetricRecord({"num-examples": 1})
    return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)


@server.main()
def main(grid, context):
    strategy = DifferentialPrivacyServerSideFixedClipping(
        FedAvg(fraction_evaluate=0.0), noise_multiplier=NOISE, clipping_norm=0.5, num_sampled_clients=PEOPLE
    )
    result = strategy.start(grid=grid, initial_arrays=ArrayRecord(network().state_dict()), num_rounds=ROUNDS)
    accountant = PLDAccountant().compose(SelfComposedDpEvent(GaussianDpEvent(NOISE), ROUNDS))
    saved = {"model": result.arrays.to_torch_state_dict(), "epsilon": float(accountant.get_epsilon(1e-4))}
    torch.save(saved, "model.pt")


run_simulation(server, client, num_supernodes=PEOPLE)

saved = torch.load("model.pt", weights_only=True)
model = network()
model.load_state_dict(saved["model"])
right = model(features[:100]).argmax(1) == targets[:100]
print(f"epsilon {saved['epsilon']:.2f}, accuracy {right.float().mean():.3f}")
