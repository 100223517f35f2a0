"""Pictures of a run."""

from __future__ import annotations

import io
from pathlib import Path

from andrea_jax.files import write_file
from andrea_jax.train.run_folder import read_metrics


def plot_loss(run_dir: str | Path, path: str | Path | None = None) -> Path:
    """Training and validation loss against tokens, from metrics.jsonl, as a PNG (`loss.png` in the run folder)."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    records = read_metrics(run_dir)
    path = Path(path) if path else Path(run_dir) / "loss.png"
    figure = Figure(figsize=(7, 4), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    train = [r for r in records if r["kind"] == "train"]
    validation = [r for r in records if r["kind"] == "validation"]
    axes.plot([r["tokens"] for r in train], [r["loss"] for r in train], color="#4477aa", lw=1, label="training")
    axes.plot(
        [r["tokens"] for r in validation], [r["loss"] for r in validation], "o-", color="#cc3311", label="validation"
    )
    if validation:
        axes.annotate(
            f"{validation[-1]['loss']:.3f}",
            (validation[-1]["tokens"], validation[-1]["loss"]),
            (-28, 8),
            textcoords="offset points",
        )
    axes.set(xlabel="tokens", ylabel="loss (nats per token)", title=Path(run_dir).name)
    axes.grid(alpha=0.3)
    axes.legend()
    picture = io.BytesIO()
    FigureCanvasAgg(figure).print_png(picture)
    write_file(path, picture.getbuffer())
    return path
