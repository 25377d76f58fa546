"""Traces: where the time of each turn went, told by OpenTelemetry. Nothing of it is loaded without `--otel`.

context      W3C Trace Context, as headers carry it
encoding     spans as OTLP's protobuf spells them
turn         one turn on its way, and its moments
layer        the outermost layer, which makes a trace of each turn
forwarding   the innermost app and what sends for it, which take the moments down
episodes     which turns are one trace
traces       all of them, and what layers tell
queue        spans on their way to whoever collects them
exporting    OpenTelemetry's SDK: its settings, its sampler, its exporter
"""
