"""Makes examples/documents/benefit-table.pdf: the one example document with ruled tables. Needs reportlab.

    python examples/make_pdf.py
"""

from __future__ import annotations

from pathlib import Path

from reportlab.lib import colors
from reportlab.lib.pagesizes import A4
from reportlab.lib.styles import getSampleStyleSheet
from reportlab.lib.units import mm
from reportlab.platypus import PageBreak, Paragraph, SimpleDocTemplate, Spacer, Table, TableStyle

OUT = Path(__file__).parent / "documents" / "benefit-table.pdf"

BENEFITS = [
    ["Benefit", "Bronze", "Silver", "Gold"],
    ["Annual limit", "5,000 euros", "20,000 euros", "60,000 euros"],
    ["Single room in hospital", "not covered", "45 euros a day", "in full"],
    ["Dental treatment a year", "250 euros", "900 euros", "2,400 euros"],
    ["Glasses and lenses, every 2 years", "80 euros", "160 euros", "320 euros"],
    ["Physiotherapy sessions a year", "6", "12", "30"],
    ["Psychotherapy sessions a year", "not covered", "20", "40"],
    ["Vaccinations for journeys", "not covered", "150 euros", "in full"],
]

PREMIUMS = [
    ["Age at entry", "Bronze", "Silver", "Gold"],
    ["0 to 17", "9.80 euros", "17.40 euros", "31.20 euros"],
    ["18 to 34", "14.50 euros", "26.90 euros", "48.70 euros"],
    ["35 to 49", "19.90 euros", "37.60 euros", "69.30 euros"],
    ["50 to 64", "28.40 euros", "55.10 euros", "98.60 euros"],
    ["65 and over", "41.70 euros", "83.20 euros", "149.50 euros"],
]

GRID = TableStyle(
    [
        ("GRID", (0, 0), (-1, -1), 0.6, colors.HexColor("#44546a")),
        ("BACKGROUND", (0, 0), (-1, 0), colors.HexColor("#dde6f0")),
        ("FONTNAME", (0, 0), (-1, 0), "Helvetica-Bold"),
        ("FONTSIZE", (0, 0), (-1, -1), 9.5),
        ("ALIGN", (1, 0), (-1, -1), "RIGHT"),
        ("TOPPADDING", (0, 0), (-1, -1), 4),
        ("BOTTOMPADDING", (0, 0), (-1, -1), 4),
    ]
)


def main() -> None:
    styles = getSampleStyleSheet()
    text = styles["BodyText"]
    story = [
        Paragraph("Health plans: benefits and premiums 2026", styles["Title"]),
        Paragraph(
            "Harbour Mutual's supplementary health plans Bronze, Silver and Gold at a glance. From when a benefit is paid is said under "
            "\u201cHealth cover and waiting periods\u201d.", text,
        ),
        Paragraph("What the plans pay", styles["Heading2"]),
        Table(BENEFITS, colWidths=[62 * mm, 35 * mm, 35 * mm, 35 * mm], style=GRID),
        Spacer(1, 6 * mm),
        Paragraph("Limits are for each insured person and calendar year, unless the table says otherwise.", text),
        PageBreak(),
        Paragraph("What the plans cost", styles["Heading2"]),
        Paragraph("Monthly premium of a health plan by age at entry:", text),
        Spacer(1, 2 * mm),
        Table(PREMIUMS, colWidths=[62 * mm, 35 * mm, 35 * mm, 35 * mm], style=GRID),
        Spacer(1, 6 * mm),
        Paragraph("Families pay for the two oldest children only; every further child is insured free of charge.", text),
        Paragraph("Premiums are guaranteed until 31 December 2027.", text),
    ]
    # `invariant`: the same bytes on every run, so that a rebuilt file is an unchanged document.
    SimpleDocTemplate(
        str(OUT), pagesize=A4, title="Health plans: benefits and premiums 2026", author="Harbour Mutual", invariant=1,
        leftMargin=20 * mm, rightMargin=20 * mm,
    ).build(story)


if __name__ == "__main__":
    main()
