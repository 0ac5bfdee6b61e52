# Every tier on CPUs in one container, under the supervisor of `tetrarch up`: the same packages as `make setup`.
# Build from the repository's root: docker build -f deploy/compose/cpu.Dockerfile .
FROM python:3.11-slim AS build
RUN pip install --no-cache-dir uv==0.13.9
ENV UV_COMPILE_BYTECODE=1 VIRTUAL_ENV=/opt/venv
WORKDIR /src
# Packages change seldom: they are a layer of their own. SGLang goes in without its CUDA packages; the [sglang-cpu]
# extra is what it needs of the others.
COPY pyproject.toml ./
RUN uv venv "$VIRTUAL_ENV" \
    && uv pip install --no-cache --torch-backend cpu torch==2.13.0 -r pyproject.toml --extra buffer --extra reward \
       --extra rollout --extra trainer --extra console --extra embedded --extra sglang-cpu \
    && uv pip install --no-cache --no-deps sglang==0.5.23 xgrammar==0.2.7
COPY README.md ./
COPY proto/gen proto/gen
COPY proto/service_config proto/service_config
COPY services services
RUN uv pip install --no-cache --no-deps .

FROM python:3.11-slim
RUN useradd --no-log-init --create-home --home-dir /var/lib/tetrarch --uid 10001 tetrarch \
    && install -d -o tetrarch -g tetrarch /data
COPY --from=build /opt/venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH PYTHONUNBUFFERED=1
# The supervisor keeps its state, and a run file's relative paths start, here.
WORKDIR /data
USER 10001
CMD ["tetrarch", "up"]
