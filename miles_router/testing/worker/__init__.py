"""A SGLang worker without a model: its protocol, spoken exactly."""
