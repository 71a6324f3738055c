"""
Two partitions into clients that differ
=======================================

A partition says which client gets which examples. The area of a circle shows how many examples of a class a client
holds. "dirichlet" gives each client all classes in uneven shares. "classes" gives each client only two classes.
"""

import matplotlib.pyplot as plt
import torch

import equipoise as eq

figure, axes = plt.subplots(1, 2, sharey=True, figsize=(9.5, 4))
for axis, partition in zip(axes, ("dirichlet", "classes"), strict=True):
    train = eq.data.digits(clients=20, partition=partition, split_by="examples", test=0.2, seed=0).train
    owner = torch.repeat_interleave(torch.arange(len(train)), train.sizes)
    counts = torch.zeros(len(train), 10).index_put_((owner, train.y.long()), torch.ones(len(owner)), accumulate=True)
    rows, columns = counts.nonzero(as_tuple=True)
    axis.scatter(rows + 1, columns, s=4 * counts[rows, columns], alpha=0.7)
    axis.set(title=f'partition="{partition}"', xlabel="client", xticks=range(1, 21, 3), yticks=range(10))
axes[0].set_ylabel("class")
plt.show()
