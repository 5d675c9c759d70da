"""Trains as `dlrm.train` does, and prints the threads of process groups that are left."""

from pathlib import Path

from dlrm.train import main

if __name__ == "__main__":
    code = main()
    names = {path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")}
    print(f"left: {sorted(name for name in names if 'gloo' in name)}", flush=True)
    raise SystemExit(code)
