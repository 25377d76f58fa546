"""A simulated SGLang worker without a model, which implements SGLang's HTTP protocol exactly."""
