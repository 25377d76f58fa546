"""aider in a directory with one file, asked for one edit after the other."""

import os
import sys
from pathlib import Path

from aider.coders import Coder
from aider.io import InputOutput
from aider.models import Model


def main(base_url, mode):
    os.environ |= {"OPENAI_API_BASE": base_url, "OPENAI_API_KEY": "none"}
    Path("sums.txt").write_text("sum 0\n")
    model = Model("openai/m", weak_model="openai/m")
    coder = Coder.create(
        main_model=model,
        edit_format="diff",
        io=InputOutput(yes=True, pretty=False, fancy_input=False),
        fnames=["sums.txt"],
        use_git=False,
        stream=mode == "streamed",
        map_tokens=0,
        suggest_shell_commands=False,
    )
    for number in range(5):
        coder.run(f"Make it {number + 1}.")
    print(Path("sums.txt").read_text().strip())


main(*sys.argv[1:])
