// A heading that is the searched word comes first, then guides, then measurements and
// the glossary, then the reference, which names every word.
var Scorer = {
  score: ([page, title, anchor, description, score, file, kind]) => {
    if (kind === "title") score += 3;
    if (page.startsWith("api/") || page === "commands") return score - 20;
    const behind = ["results", "benchmarks", "performance", "reproduction"];
    behind.push("sharp_edges", "glossary", "design");
    return behind.includes(page) ? score - 8 : score;
  },
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
