# One image for our own processes: the ext_proc server, the collector, the configuration writer, the simulated engines.
FROM python:3.12-slim

WORKDIR /src
COPY pyproject.toml README.md ./
COPY extproc ./extproc
COPY loadtest ./loadtest
COPY policies ./policies
# No package cache: the image is rebuilt from scratch anyway when the sources change.
RUN pip install --no-cache-dir . \
    && useradd --uid 10001 --no-create-home tokenfleet \
    # Named volumes take the owner of the folder they are first mounted on.
    && install --directory --owner tokenfleet /config /eds

USER tokenfleet
WORKDIR /
ENV PYTHONUNBUFFERED=1
ENTRYPOINT ["tokenfleet"]
CMD ["--help"]
