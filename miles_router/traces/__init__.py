"""Traces: where the time of each turn went, told by OpenTelemetry. Nothing of it is loaded without `--otel`.

context      W3C Trace Context, as headers carry it
encoding     spans as OTLP's protobuf spells them
turn         one turn on its way, and its moments
plain        turns that are one span, written some in a row
episodes     which turns are one trace
waiting      the gate and the queue for room, which take down who waits
sending      the innermost app, which tells engines whose span they are part of
traces       all of them, and what layers tell
queue        spans on their way to whoever collects them
exporting    OpenTelemetry's SDK: its settings, its sampler, its exporter
"""
