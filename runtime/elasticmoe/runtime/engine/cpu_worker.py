"""Our worker on a CPU."""

from vllm.v1.worker.cpu_worker import CPUWorker

from elasticmoe.runtime.engine.worker import ElasticWorkerMixin


class ElasticCPUWorker(ElasticWorkerMixin, CPUWorker):
    """vLLM's CPU worker over the shared pool."""
