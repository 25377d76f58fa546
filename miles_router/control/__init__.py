"""Operations on the whole fleet: health probes, fan-out of control requests, pause and sleep, weight updates."""
