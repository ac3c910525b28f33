"""Our worker on a GPU."""

from vllm.v1.worker.gpu_worker import Worker

from elasticmoe.runtime.engine.worker import ElasticWorkerMixin


class ElasticGPUWorker(ElasticWorkerMixin, Worker):
    """vLLM's GPU worker over the shared pool."""
