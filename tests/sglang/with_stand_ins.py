"""Run a module in SGLang's environment without a GPU: `python with_stand_ins.py -m MODULE [arguments]`."""

import runpy
import sys

import launch_worker


def main() -> None:
    launch_worker.prepare()
    _, _, module, *arguments = sys.argv
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
