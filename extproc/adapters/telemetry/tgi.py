"""Hugging Face TGI, read from its documentation: it publishes queue and batch, nothing of its cache."""

from extproc.adapters.telemetry.dialect import Dialect, total

TGI = Dialect(
    name="tgi",
    mark="tgi_",
    waiting=total("tgi_queue_size"),
    running=total("tgi_batch_current_size"),
)
