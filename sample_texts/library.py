"""A small lending library: something to follow names, calls and brackets in."""

import json
from collections import Counter
from dataclasses import dataclass, field
from datetime import date, timedelta
from pathlib import Path

LOAN = timedelta(days=28)
FINE_PER_DAY = 0.2


@dataclass
class Book:
    """A book, and who has it."""

    title: str
    author: str
    reader: str = ""
    due: date | None = None


@dataclass
class Library:
    """Books by their number."""

    books: dict[int, Book] = field(default_factory=dict)
    history: list[tuple[str, int]] = field(default_factory=list)

    def lend(self, number: int, reader: str, today: date) -> date:
        """Lends a book; returns the day on which it is due."""
        book = self.books[number]
        if book.reader:
            raise ValueError(f"book {number} is with {book.reader}")
        due = today + LOAN
        book.reader, book.due = reader, due
        self.history.append((reader, number))
        return due

    def give_back(self, number: int, today: date) -> float:
        """Takes a book back; returns what is to be paid."""
        book = self.books[number]
        owed = fine(book.due, today)
        book.reader, book.due = "", None
        return owed


def fine(due: date | None, today: date) -> float:
    """What is to be paid for a book that comes back today."""
    if due is None or today <= due:
        return 0.0
    late = (today - due).days
    return round(late * FINE_PER_DAY, 2)


def read(path: Path) -> Library:
    """Reads a library from a file."""
    entries = json.loads(path.read_text("utf-8"))
    books = {int(number): Book(entry["title"], entry["author"]) for number, entry in entries.items()}
    return Library(books)


def write(library: Library, path: Path) -> None:
    """Writes a library into a file."""
    entries = {}
    for number, book in library.books.items():
        entries[number] = {"title": book.title, "author": book.author}
    path.write_text(json.dumps(entries, indent=2), "utf-8")


def overdue(library: Library, today: date) -> list[Book]:
    """The books that should have come back, the longest waited for first."""
    late = [book for book in library.books.values() if book.due is not None and book.due < today]
    return sorted(late, key=lambda book: (book.due, book.title))


def popular(library: Library, n: int = 3) -> list[tuple[str, int]]:
    """The titles that were lent most often, and how often."""
    counts = Counter(number for _, number in library.history)
    return [(library.books[number].title, times) for number, times in counts.most_common(n)]


def report(library: Library, today: date) -> str:
    """What a librarian wants to know in the morning."""
    lines = [f"{len(library.books)} books"]
    for book in overdue(library, today):
        owed = fine(book.due, today)
        lines.append(f"{book.title}: {book.reader} owes {owed:.2f}")
    for title, times in popular(library):
        lines.append(f"{title}: lent {times} times")
    return "\n".join(lines)


def main(path: Path, today: date) -> None:
    """Prints the report of a library."""
    library = read(path)
    print(report(library, today))


if __name__ == "__main__":
    main(Path("library.json"), date.today())
