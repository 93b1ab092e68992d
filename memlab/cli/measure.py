"""`memlab measure`: one training step, plain and with each technique, side by side."""

from functools import partial

from memlab.cli import report
from memlab.cli.choices import choose_device, choose_folder, choose_setting, choose_techniques
from memlab.cli.errors import UsageError, in_one_line, is_out_of_memory
from memlab.cli.results import write
from memlab.cli.rows import Announce, Row, SideBySide, dry_row
from memlab.train import Setting, Technique


def measure_techniques(
    *,
    model: str | None,
    batch: int | None,
    seq_len: int | None,
    dtype: str | None,
    names: list[str] | None,
    device: str | None,
    dry: bool,
    out: str,
) -> int:
    """Measure, print a table, write pictures and numbers; 1 if a technique failed, else 0."""
    chosen = choose_techniques(names)
    folder = choose_folder(out)
    setting = choose_setting(model, batch, seq_len, dtype, choose_device(device, dry), dry)
    report.say(report.headline(setting, dry) + "\n")
    with report.progress(stages=len(chosen) * (1 if dry else 2)) as announce:
        rows = measured_rows(setting, chosen, dry, announce)
    report.console.print(report.table(rows))
    if remarks := "\n".join(map(report.paragraph, report.remarks(rows))):
        report.say(f"\n{remarks}")
    report.say(f"\nplain: {rows[0].trace}")
    write(rows, f"{setting}, dry run" if dry else str(setting), folder)
    return int(any(row.failure for row in rows))


def measured_rows(
    setting: Setting, chosen: dict[str, Technique], dry: bool, announce: Announce
) -> list[Row]:
    """A row for each technique, the plain one first. A technique that fails has a row that says
    so: the others are not lost with it."""
    row_of = partial(dry_row, setting) if dry else SideBySide(setting, chosen["plain"]).row
    rows: list[Row] = []
    for name, technique in chosen.items():
        try:
            rows.append(row_of(name, technique, announce))
        except Exception as error:
            if rows:
                rows.append(Row(name, failure=in_one_line(error)))
            elif is_out_of_memory(error):
                raise UsageError(
                    f"the plain step ran out of memory with {setting}; try "
                    f"--batch {max(1, setting.batch // 2)}, or --dry-run, which takes none"
                ) from error
            else:
                raise
    return rows
