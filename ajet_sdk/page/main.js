// Where the page has episodes in it (the quick start's), it shows them; else it asks the daemon that served it.

function still(main, data) {
  const all = new Map(Object.entries(data.texts).map(([id, text]) => [Number(id), text])), texts = () => all;
  main.replaceChildren(h("h1", {}, data.title), h("p", { class: "intro" }, data.intro), legend(),
    ...data.sections.map((section) => h("section", { class: "section" }, h("h2", {}, section.heading), ...section.episodes.map((record) => episodeCard(record, texts)))));
}

tips();
const given = JSON.parse(document.getElementById("ajet-data").textContent);
if (given) still(document.getElementById("main"), given);
else new Live(document.getElementById("main")).route();
