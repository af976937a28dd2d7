"""Draw the generated pages and print the words of all others: ``make docs``."""

from tests.support.documents import picture, promises, settings
from tests.support.documents.imports import imports_between_folders
from tests.support.documents.words import words_table


def main() -> None:
    promises.PAGE.write_text(promises.page(promises.read_promises()), encoding="utf-8")
    settings.PAGE.write_text(settings.page(), encoding="utf-8")
    picture.PICTURE.write_text(picture.picture(imports_between_folders()), encoding="utf-8")
    print(words_table())


if __name__ == "__main__":
    main()
