"""Run `attnscope page`: write an interactive HTML page of all heads."""

from attnscope.cli.progress import progress
from attnscope.cli.shared import ModelOptions, PrintingOptions
from attnscope.options import refuse_beside
from attnscope.studies.maps.options import PageOptions


def page(
    *, page_options: PageOptions, model_options: ModelOptions, printing_options: PrintingOptions
) -> None:
    """Write one HTML file in which you explore all heads, without server or network.

    - `attnscope page "The animal didn't cross the street because it was too tired." -o page.html`
    - `attnscope page "It was too tired." "It was too wide." --record out/heads.npz`
    - `attnscope page --record heatmap.npz`
    - `attnscope page --image photo.jpg "What is on the table?" -m ./smolvlm --generate 20`
    """
    from attnscope.output import print_document, print_notes
    from attnscope.studies.maps.page import write_page

    if str(page_options.out) == "-":
        refuse_beside("-o -", json=printing_options.json)
    with progress(printing_options.quiet) as report_progress:
        written = write_page(model_options.model, page_options, model_options.loading, report_progress)
    print_notes(written.notes, printing_options.quiet)
    # Print where the page is. If it went to stdout or into a pipe, print that only as JSON.
    if printing_options.json or not written.is_stream:
        answer = "" if printing_options.quiet else written.answer
        print_document(written.as_json, [written.path], printing_options.json, answer)
