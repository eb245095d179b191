// Pages that explain come before the reference, which names every word.
var Scorer = {
  score: ([page, title, anchor, description, score]) =>
    page.startsWith("api/") || page === "commands" ? score - 20 : score,
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
