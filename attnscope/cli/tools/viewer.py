"""`attnscope viewer`."""

from attnscope.cli import groups


@groups.command(omit=("formats",), out="The file to write; `-` is stdout.  [default: attnscope-out/viewer.html]")
def viewer(*, where: groups.Where, printing: groups.Printing) -> None:
    """Write one HTML file that shows the saved records that you drop on it.

    It shows records of attention, heads, atlases, comparisons, relations and ablations (npz, json), and bare arrays.

    - `attnscope viewer -o viewer.html`
    """
    from attnscope.output import HOME, print_document
    from attnscope.records.frame.storage import PAGE_MARK, is_stream, require_replaceable, write_stream
    from attnscope.views.page import PAGE_SCHEMA, empty_page

    page, path = empty_page(), where.out or HOME / "viewer.html"
    if is_stream(path):
        write_stream(path, page.html.encode())
    else:
        require_replaceable(path, holds=PAGE_MARK)
        page.save(path)
        print_document(lambda: {"schema": PAGE_SCHEMA, "bytes": len(page.html)}, [path], printing.json)
