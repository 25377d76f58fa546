"""mini-swe-agent in a directory, over litellm."""

import sys

from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_model import LitellmModel


def main(base_url, mode):
    model = LitellmModel(
        model_name="openai/m",
        model_kwargs={"api_base": base_url, "api_key": "none", "num_retries": 0},
        cost_tracking="ignore_errors",
        set_cache_control="default_end",
    )
    agent = DefaultAgent(
        model,
        LocalEnvironment(),
        system_template="You work in a shell.",
        instance_template="Task: {{task}}",
        cost_limit=0,
    )
    print(agent.run("What is 17 plus 25?")["submission"].strip())


main(*sys.argv[1:])
