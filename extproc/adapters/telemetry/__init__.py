"""What engines say of themselves: metric pages in, :class:`extproc.model.Reading` out.

``exposition`` finds samples in a Prometheus page, each dialect names the samples of one engine, ``scrape`` asks over
HTTP, ``life`` turns answers into a state, ``collector`` does so for the whole fleet and leaves the readings in a store.
"""
