"""W&B (offline) and MLflow (a local store) receive what the scaler did; both are read back from disk."""

from __future__ import annotations

import json
import math
import struct

import pytest
import torch

from amp_core import GradScaler
from amp_core.callbacks import MLflow, WandB

# Their imports and local stores warn about parts that we do not use.
pytestmark = pytest.mark.filterwarnings("ignore")


def train(callback):
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = GradScaler("cpu", 8.0, named_parameters=model.named_parameters())
    with callback.listen(scaler):
        for number in range(3):
            optimizer.zero_grad()
            scaler.scale(model(torch.ones(1, 2)).sum()).backward()
            if number == 1:
                model.bias.grad[1] = math.inf
            scaler.step(optimizer, max_norm=1.0)
            scaler.update()


def records_in(data):
    """Yield the records of a ``.wandb`` file: LevelDB's log format, after a header of 7 bytes."""
    whole, at = b"", 7
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        length, kind = struct.unpack("<HB", data[at + 4 : at + 7])
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            yield whole
            whole = b""


def rows_of(path):
    """Return the rows that wandb wrote to an offline run's file."""
    from wandb.proto.wandb_internal_pb2 import Record

    records = map(Record.FromString, records_in(path.read_bytes()))
    return [
        {i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in record.history.item}
        for record in records
        if record.WhichOneof("record_type") == "history"
    ]


@pytest.fixture
def wandb(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb", reason="not installed: pip install 'amp-core[wandb]'")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    yield wandb
    wandb.finish()


def test_wandb_has_the_steps(wandb, tmp_path):
    """A step is missing, stands under the wrong number, or moves the step of the user's own log."""
    run = wandb.init(project="amp")
    run.log({"mine": 1})
    train(WandB())
    run.log({"mine": 2})
    wandb.finish()
    wandb.teardown()  # waits for the process that writes an offline run; `finish` does not
    (path,) = tmp_path.rglob("*.wandb")
    rows = rows_of(path)
    assert [row["mine"] for row in rows if "mine" in row] == [1, 2]
    scales = [(row["amp/step"], row["amp/scale"]) for row in rows if "amp/scale" in row]
    assert scales == [(0, 8.0), (1, 8.0), (2, 4.0), (2, 4.0)]
    assert [row["amp/SGD/skipped"] for row in rows if "amp/SGD/skipped" in row] == [0.0, 1.0, 0.0]
    (text,) = (row["amp/SGD/skips"] for row in rows if "amp/SGD/skips" in row)
    assert "bias" in text


def test_wandb_without_a_run(wandb):
    """Without a run, the error is about an attribute of None."""
    with pytest.raises(RuntimeError, match=r"call wandb.init\(\) first"):
        WandB()


@pytest.fixture
def mlflow(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow", reason="not installed: pip install 'amp-core[mlflow]'")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # MLflow 3 asks for it
    mlflow.set_tracking_uri((tmp_path / "mlruns").as_uri())
    yield mlflow
    mlflow.end_run()


def test_mlflow_has_the_steps(mlflow):
    """A metric is missing, stands under the wrong number, or the reason for a skip is lost."""
    with mlflow.start_run() as run:
        train(MLflow())
    client = mlflow.MlflowClient()

    def history(name):
        return sorted((m.step, m.value) for m in client.get_metric_history(run.info.run_id, name))

    assert history("amp/scale") == [(0, 8.0), (1, 8.0), (2, 4.0), (2, 4.0)]
    assert history("amp/SGD/skipped") == [(0, 0.0), (1, 1.0), (2, 0.0)]
    assert history("amp/SGD/total_norm")[1] == (1, math.inf)
    assert "bias" in mlflow.artifacts.load_text(f"runs:/{run.info.run_id}/amp/SGD/skips/1.txt")


def test_mlflow_without_a_run(mlflow):
    """Without a run, MLflow starts one of its own, or the error is about an attribute of None."""
    with pytest.raises(RuntimeError, match=r"call mlflow.start_run\(\) first"):
        MLflow()
