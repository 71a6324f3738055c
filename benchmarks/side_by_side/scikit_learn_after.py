"""The same model over 40 clients whose examples stay with them: a score for every client."""

from sklearn.datasets import load_digits

import equipoise as eq

x, y = load_digits(return_X_y=True)
client = [k % 40 for k in range(len(y))]
data = eq.data.from_arrays((x / 16).astype("float32"), y, client, split_by="examples", test=0.25, seed=0)
model = eq.models.Softmax(data.features, data.classes)
result = eq.train(model, data, eq.Algorithm(solver=eq.solvers.SGD(lr=0.3)), rounds=60, clients_per_round=40, seed=0)
error = result.clients.where("test").error
print(f"error {error.mean():.3f}; 90th percentile over clients {eq.metrics.percentile(error, 90):.3f}; worst {error.max():.3f}")
