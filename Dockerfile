# The router, from a wheel of this source: docs/deploy.md. Build: docker build -t miles-router .
# EXTRAS: `tito` for text rollouts and sessions, which need the model's tokenizer; `otel` for traces.
ARG PYTHON=python:3.12-slim

FROM ${PYTHON} AS wheel
WORKDIR /source
COPY . .
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM ${PYTHON}
ARG EXTRAS=tito
COPY --from=wheel /wheels /wheels
RUN pip install --no-cache-dir "$(echo /wheels/*.whl)[${EXTRAS}]" && rm -r /wheels \
 && useradd --uid 10001 --create-home router && install -d -o router /state
USER 10001
EXPOSE 31000
# Its own volume: --state-dir /state. Tokenizers from a hub are kept in /home/router/.cache.
VOLUME /state
# SIGTERM lets requests finish (--shutdown-timeout); give the container longer than that.
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=20s CMD ["python", "-c", \
 "import urllib.request; urllib.request.urlopen('http://127.0.0.1:31000/liveness', timeout=4)"]
ENTRYPOINT ["miles-router", "--host", "0.0.0.0"]
