"""A command to supervise: each start does what the next row of plan.json says, and ends as it says."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

folder = Path(sys.argv[sys.argv.index("--output_dir") + 1])
rows = json.loads((folder.parent / "plan.json").read_text())
starts = folder / "starts"
count = len(starts.read_text()) if starts.exists() else 0
starts.write_text("x" * (count + 1))
row, attempt = rows[min(count, len(rows) - 1)], Path(os.environ["PYTHON_FINETUNE_SUPERVISED"])
if "checkpoint" in row:
    (folder / f"checkpoint-{row['checkpoint']}").mkdir(exist_ok=True)
for name in ("position-0", "samples.json"):
    if name in row:
        (attempt / name).write_text(json.dumps(row[name]))
for number, event, facts in row.get("hosts tell", ()):
    from finetune.run.supervised import tell

    (attempt.parent / f"attempt-{number}").mkdir(exist_ok=True)
    tell(attempt.parent, event, "so the test says", attempt=number, **facts)
if "rank says" in row:
    from finetune.errors import RunError
    from finetune.run.supervised import tell_end

    tell_end(row["rank says"], RunError("the disk is full") if row["rank says"] else None)
if row.get("leaves a rank"):
    wait = "import time; time.sleep(600)"
    child = subprocess.Popen([sys.executable, "-c", wait], start_new_session=True, env={**os.environ, "RANK": "0"})
    (folder / "left").write_text(str(child.pid))
if "builds" in row:  # as torch's FileBaton: the lock is open until the build is done
    lock = Path(os.environ["TORCH_EXTENSIONS_DIR"], row["builds"], "lock")
    lock.parent.mkdir()
    os.open(lock, os.O_CREAT | os.O_EXCL)
    time.sleep(2)
if row.get("waits"):
    signal.signal(signal.SIGINT, lambda *_: sys.exit(130))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
    (folder / "waits").touch()
    time.sleep(60)
if row.get("deletes its folder"):
    shutil.rmtree(folder)
if row["status"] < 0:
    os.kill(os.getpid(), -row["status"])
    time.sleep(10)
sys.exit(row["status"])
