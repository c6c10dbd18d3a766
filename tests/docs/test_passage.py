"""From an answer to the page that it rests on, as it is shipped: ask, follow the citation, look under the highlight."""

from __future__ import annotations

import html
import re

import httpx
import pypdfium2
from desk import ROOT, Product

QUESTION = "How many physiotherapy sessions a year does the Gold plan pay?"


def test_an_answer_quotes_page_and_box_and_leads_to_the_picture(product: Product) -> None:
    """The citation of the example PDF has page and boxes; the page shows that page's picture with the same boxes; and what the file says under them
    is the passage's text."""
    site = f"http://{product.address}"
    with httpx.Client(base_url=site, timeout=60) as client:
        answer = client.post("/api/v1/support/answer", json={"question": QUESTION}, headers={"Authorization": f"Bearer {product.key}"}).json()
        (citation,) = answer["citations"]
        assert (citation["document"], citation["page"]) == ("documents/benefit-table.pdf", 1)
        assert {box[0] for box in citation["boxes"]} == {1}

        assert client.post("/login", data={"key": product.key}, headers={"Origin": site}).status_code == 303
        path = f"/flights/{answer['trace_id']}/passages/{citation['passage_id']}"
        assert f'href="{path}"' in client.get(f"/flights/{answer['trace_id']}").text
        page = client.get(path)
        assert page.status_code == 200
        (source,) = re.findall(r'<img src="([^"]+)"', page.text)
        picture = client.get(html.unescape(source))
        assert (picture.status_code, picture.headers["content-type"], picture.content[:4]) == (200, "image/png", b"\x89PNG")

    (width, height) = (float(one) for one in re.findall(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', page.text.split('class="marks"')[1])[0])
    rects = [tuple(map(float, one)) for one in re.findall(r'<rect x="([\d.]+)" y="([\d.]+)" width="([\d.]+)" height="([\d.]+)"/>', page.text)]
    assert [(x, top, round(x + wide, 1), round(top + high, 1)) for x, top, wide, high in rects] == [tuple(box[1:]) for box in citation["boxes"]]
    with pypdfium2.PdfDocument(ROOT / "examples" / "documents" / "benefit-table.pdf") as document:
        assert document[0].get_size() == (width, height)
        text = document[0].get_textpage()
        under = " ".join(text.get_text_bounded(x, height - top - high, x + wide, height - top) for x, top, wide, high in rects)
        text.close()
    rows = citation["text"].split("\n")
    assert under.split() == " ".join([rows[0], *rows[2:]]).replace("|", " ").split()
