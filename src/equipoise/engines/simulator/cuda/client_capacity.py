"""How many clients a GPU's memory holds at once, by what a step of a few of them takes."""

from __future__ import annotations

import torch

from equipoise.engines.simulator.client_queue import ClientQueue
from equipoise.engines.simulator.convnet_path import fastest_gradients
from equipoise.engines.simulator.example_batches import ExampleBatch
from equipoise.engines.simulator.local_rule import LocalRule
from equipoise.engines.simulator.local_work import Workplace

_SHARE = 0.6  # of the free memory, for one chunk: graphs keep some of it
_TRIED = 4  # clients


class ClientCapacity:
    """How many clients a GPU trains at once, measured once for every width of a batch."""

    def __init__(self, place: Workplace) -> None:
        self.place, self._bytes, self._granted = place, dict[int, int](), 0

    def most_clients(self, queue: ClientQueue, rule: LocalRule, batched: bool = True) -> int:
        """How many clients of a queue to train at once; unless `batched`, only their updates are in memory together."""
        largest = int(queue.sizes.max())
        width = largest if rule.whole_clients else min(rule.solver.batch_size or 1, largest)
        if batched and width not in self._bytes:
            self._bytes[width] = self._measured(queue, width)
        parameters = queue.models[0].nbytes
        table = 24 * largest * max(1, int(queue.steps.max()) * width // max(1, largest))
        each = (self._bytes[width] + 5 * parameters if batched else 2 * parameters) + table
        if each * len(queue) <= self._granted:  # asking a device takes a millisecond
            return len(queue)
        device = self.place.clients.device
        free = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        limit = torch.cuda.get_per_process_memory_fraction(device) * torch.cuda.get_device_properties(device).total_memory
        free = min(free, int(limit) - torch.cuda.memory_allocated(device))
        most = int(_SHARE * free) // each
        if most >= len(queue):
            self._granted = each * len(queue)
        return max(1, min(len(queue), most))

    def _measured(self, queue: ClientQueue, width: int) -> int:
        """Bytes per client that a gradient takes at its peak."""
        clients, device, count = self.place.clients, self.place.clients.device, min(_TRIED, len(queue))
        named = self.place.task.layout.unflatten(queue.models[:1].expand(count, -1).contiguous())
        rows = torch.zeros(count, width, dtype=torch.int64, device=device)
        dtype = queue.models.dtype
        carried = None if queue.carried is None else queue.carried[:1].expand(count, -1)
        buffers = {} if carried is None else self.place.task.carried.unflatten(carried.contiguous())
        x, y = clients.inputs(rows, dtype), clients.targets(rows, dtype)
        batch = ExampleBatch(x, y, rows.to(dtype), False, keys=rows[:, 0], buffers=buffers)
        gradients = fastest_gradients(self.place.task, device, self.place.precision)
        gradients(self.place.task, named, batch)  # libraries take their memory first
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        held = gradients(self.place.task, named, batch)
        torch.cuda.synchronize(device)
        del held
        return max(1, (torch.cuda.max_memory_allocated(device) - before) // count)
