"""Makes a page of every notebook in this folder, when the documentation is built."""

import json
from pathlib import Path
from typing import Any


def on_files(files: Any, config: Any) -> Any:
    """Add the pages to those of the site."""
    from mkdocs.structure.files import File

    for path in sorted(Path(__file__).parent.glob("*.ipynb")):
        files.append(File.generated(config, f"notebooks/{path.stem}.md", content=page(path)))
    return files


def page(path: Path) -> str:
    """Return a notebook as Markdown: its texts, its code, and what that printed."""
    parts = []
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        text = "".join(cell["source"]).strip()
        if cell["cell_type"] == "markdown":
            parts.append(text)
            continue
        parts.append(f"```python\n{text}\n```")
        for output in cell["outputs"]:
            printed = "".join(output["text"]).rstrip()
            parts.append(f"```text\n{printed}\n```")
    parts.append(f"[The notebook itself]({path.name})")
    return "\n\n".join(parts) + "\n"
