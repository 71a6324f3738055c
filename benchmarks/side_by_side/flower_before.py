"""Federated averaging by Flower: a client app, a server app and a strategy; metrics are averaged over clients."""

import logging

import torch
from digits import BATCH, CLIENTS, RATE, ROUNDS, clients
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from torch import nn

logging.getLogger("flwr").setLevel(logging.ERROR)
client_app, server_app = ClientApp(), ServerApp()


def received(message: Message, context: Context):
    net = nn.Linear(64, 10)
    net.load_state_dict(message.content["arrays"].to_torch_state_dict())
    return net, [torch.from_numpy(part) for part in clients()[context.node_config["partition-id"]]]


@client_app.train()
def train(message: Message, context: Context) -> Message:
    net, (x, y, _, _) = received(message, context)
    optimizer = torch.optim.SGD(net.parameters(), lr=RATE)
    for batch in torch.randperm(len(y)).split(BATCH):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x[batch]), y[batch]).backward()
        optimizer.step()
    content = {"arrays": ArrayRecord(net.state_dict()), "metrics": MetricRecord({"num-examples": len(y)})}
    return Message(RecordDict(content), reply_to=message)


@client_app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    net, (_, _, x, y) = received(message, context)
    error = float((net(x).argmax(1) != y).float().mean())
    return Message(RecordDict({"metrics": MetricRecord({"error": error, "num-examples": 1})}), reply_to=message)


@server_app.main()
def main(grid: Grid, context: Context) -> None:
    torch.manual_seed(0)
    strategy = FedAvg(min_train_nodes=CLIENTS, min_evaluate_nodes=CLIENTS, min_available_nodes=CLIENTS)
    result = strategy.start(grid, ArrayRecord(nn.Linear(64, 10).state_dict()), num_rounds=ROUNDS)
    print(f"error {result.evaluate_metrics_clientapp[ROUNDS]['error']:.3f}", flush=True)


if __name__ == "__main__":
    resources = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
    run_simulation(server_app, client_app, num_supernodes=CLIENTS, backend_config=resources)
