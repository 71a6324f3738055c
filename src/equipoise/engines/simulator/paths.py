"""The simulator's ways to do local work, in the order in which they are asked. A new one is a file and a line of this list."""

from __future__ import annotations

from collections.abc import Callable

from equipoise.engines.simulator.batched_steps import BatchedAutograd
from equipoise.engines.simulator.convnet_path import HandWrittenConvNet
from equipoise.engines.simulator.cpu.compiled_softmax import CompiledSoftmaxPath
from equipoise.engines.simulator.cuda.client_streams import SideBySide, SideBySideChannelsLast
from equipoise.engines.simulator.cuda.gru_clients import GruClients
from equipoise.engines.simulator.cuda.linear_rounds import LinearRounds
from equipoise.engines.simulator.cuda.step_graphs import StepGraphs
from equipoise.engines.simulator.linear_blocks import LinearBlocks
from equipoise.engines.simulator.linear_span import ExampleSpan
from equipoise.engines.simulator.local_work import LocalPath, Workplace
from equipoise.engines.simulator.one_by_one import OneByOne
from equipoise.engines.simulator.recorded_steps import RecordedSteps

PATHS: tuple[Callable[[Workplace], LocalPath], ...] = (
    LinearRounds,
    CompiledSoftmaxPath,
    ExampleSpan,
    GruClients,
    StepGraphs,
    LinearBlocks,
    HandWrittenConvNet,
    BatchedAutograd,
    RecordedSteps,
    SideBySide,
    SideBySideChannelsLast,
    OneByOne,
)
