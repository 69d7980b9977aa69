"""Prometheus metrics: every name is here, one set per tier, one small HTTP server per process."""

from prometheus_client import disable_created_metrics

from triptych.observe.metrics.enginecore import EngineMetrics
from triptych.observe.metrics.frontend import (
    ChildMetrics,
    ChildTotals,
    ChoiceGauges,
    FrontendMetrics,
    ModelMetrics,
)
from triptych.observe.metrics.frontend_engines import EngineGauges, EngineState, VllmNames
from triptych.observe.metrics.process import BuildInfo, CertificateExpiry, LoopLag
from triptych.observe.metrics.worker import ExpertChoices, WorkerMetrics

__all__ = [
    "BuildInfo",
    "CertificateExpiry",
    "ChildMetrics",
    "ChildTotals",
    "ChoiceGauges",
    "EngineGauges",
    "EngineMetrics",
    "EngineState",
    "ExpertChoices",
    "FrontendMetrics",
    "LoopLag",
    "ModelMetrics",
    "VllmNames",
    "WorkerMetrics",
]

disable_created_metrics()  # a series with the time of creation beside each counter: twice as many
