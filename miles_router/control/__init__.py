"""What is done to the whole fleet: probes, fan-out, standstills, weight updates."""
